// Batch norm, addition of another map, and activation of channels-last maps, forward and backward.
//
// A thread owns 16 bytes of channels and loops over rows: threadIdx.x runs over channels, threadIdx.y over rows. Sums over
// rows are accumulated per thread in registers, then per block, then over all blocks in a fixed order: the same numbers in
// every run. All kernels are passes bound by memory bandwidth: x for the statistics; x -> y; x, dy for the sums of the
// gradient; x, dy -> dx. The value between norm and activation is recomputed, not stored.
#include "../batch_norm.h"
#include "rows.cuh"

namespace rtdetr::cuda {
namespace {

constexpr int kMaxBlocksToWrite = 132 * 8;

template <int V> __device__ __forceinline__ void load_floats(float (&values)[V], const float* address) {
#pragma unroll
  for (int i = 0; i < V; i += 4) {
    const float4 four = __ldg(reinterpret_cast<const float4*>(address + i));
    values[i] = four.x, values[i + 1] = four.y, values[i + 2] = four.z, values[i + 3] = four.w;
  }
}

// Mean, variance and number of rows over all processes, merged from those of each; for channels first, first + 1, ...
template <int V> struct Statistics {
  float mean[V], variance[V], count;

  __device__ __forceinline__ Statistics(const Norm& norm, int channels, int first) {
    const int64_t stride = 2 * channels + kStatisticsTail;
    load_floats(mean, norm.statistics + first);
    load_floats(variance, norm.statistics + channels + first);
    count = norm.statistics[2 * channels];
    for (int p = 1; p < norm.processes; ++p) {
      const float* own = norm.statistics + p * stride;
      const float more = own[2 * channels], share = more / (count + more);
      float other[V], spread[V];
      load_floats(other, own + first);
      load_floats(spread, own + channels + first);
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const float away = other[i] - mean[i];
        mean[i] += away * share;
        variance[i] += (spread[i] - variance[i] + away * away * (1 - share)) * share;
      }
      count += more;
    }
  }
};

// The norm as an affine function: x * scale + shift.
template <int V> struct Line {
  float scale[V], shift[V];

  __device__ __forceinline__ Line(const Statistics<V>& statistics, const Norm& norm, int first) {
    load_floats(scale, norm.weight + first);
    load_floats(shift, norm.bias + first);
#pragma unroll
    for (int i = 0; i < V; ++i) {
      scale[i] *= rsqrtf(statistics.variance[i] + norm.eps);
      shift[i] = fmaf(-statistics.mean[i], scale[i], shift[i]);
    }
  }
  __device__ __forceinline__ float operator()(float x, int i) const { return fmaf(x, scale[i], shift[i]); }
};

template <Activation kind> __device__ __forceinline__ float activate(float z) {
  if constexpr (kind == Activation::relu) return z < 0 ? 0.0f : z;  // keeps NaN
  if constexpr (kind == Activation::silu) return __fdividef(z, 1 + __expf(-z));
  return z;
}

template <Activation kind> __device__ __forceinline__ float slope(float z) {
  if constexpr (kind == Activation::relu) return z <= 0 ? 0.0f : 1.0f;
  if constexpr (kind == Activation::silu) {
    const float s = __fdividef(1, 1 + __expf(-z));
    return s * (1 + z * (1 - s));
  }
  return 1;
}

// Moments about the first row, which is close enough to the mean to avoid cancellation.
template <class T> struct Moments {
  static constexpr int V = kWidth<T>;
  struct Inputs {
    const T* x;
  };
  using Loaded = Channels<T, V>;
  float about[V];

  __device__ __forceinline__ Moments(const Inputs& inputs, int, int first) {
    const auto values = Loaded::load(inputs.x + first);
#pragma unroll
    for (int i = 0; i < V; ++i) about[i] = values[i];
  }
  static __device__ __forceinline__ Loaded load(const Inputs& inputs, int64_t at) { return Loaded::load(inputs.x + at); }
  __device__ __forceinline__ void add(const Inputs&, int64_t, const Loaded& values, float (&a)[V], float (&b)[V]) const {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const float away = values[i] - about[i];
      a[i] += away;
      b[i] = fmaf(away, away, b[i]);
    }
  }
  static __device__ __forceinline__ void close(float (&)[V]) {}
};

// Sums of g, the gradient before the activation, and of g * (x - mean), which close() divides by the standard deviation.
template <class T, Activation kind, bool with_other> struct GradientSums {
  static constexpr int V = kWidth<T>;
  struct Inputs {
    const T *x, *grad, *other;
    T* g;
    Norm norm;
  };
  struct Loaded {
    Channels<T, V> x, grad, other;
  };
  const Statistics<V> statistics;
  const Line<V> line;
  const float eps;

  __device__ __forceinline__ GradientSums(const Inputs& inputs, int channels, int first)
      : statistics(inputs.norm, channels, first), line(statistics, inputs.norm, first), eps(inputs.norm.eps) {}
  static __device__ __forceinline__ Loaded load(const Inputs& inputs, int64_t at) {
    Loaded loaded{Channels<T, V>::load(inputs.x + at), Channels<T, V>::load(inputs.grad + at), {}};
    if constexpr (with_other) loaded.other = Channels<T, V>::load(inputs.other + at);
    return loaded;
  }
  __device__ __forceinline__ void add(const Inputs& inputs, int64_t at, const Loaded& loaded, float (&a)[V],
                                      float (&b)[V]) const {
    float g[V];
#pragma unroll
    for (int i = 0; i < V; ++i) {
      float z = 0;
      if constexpr (kind == Activation::relu && with_other)
        z = loaded.other[i];
      else if constexpr (with_other)
        z = line(loaded.x[i], i) + loaded.other[i];
      else if constexpr (kind != Activation::none)
        z = line(loaded.x[i], i);
      g[i] = loaded.grad[i] * slope<kind>(z);
      a[i] += g[i];
      b[i] = fmaf(g[i], loaded.x[i] - statistics.mean[i], b[i]);
    }
    if constexpr (with_other) store(inputs.g + at, g);
  }
  __device__ __forceinline__ void close(float (&b)[V]) const {
#pragma unroll
    for (int i = 0; i < V; ++i) b[i] *= rsqrtf(statistics.variance[i] + eps);
  }
};

template <class T, Activation kind, bool with_plus> __global__ void __launch_bounds__(kThreads)
    normalise(const T* __restrict__ x, const T* __restrict__ plus, Norm norm, Running running, int64_t rows, int channels,
              T* __restrict__ y) {
  constexpr int V = kWidth<T>;
  const int first = (blockIdx.y * blockDim.x + threadIdx.x) * V;
  if (first >= channels) return;
  const Statistics<V> statistics(norm, channels, first);
  const Line<V> line(statistics, norm, first);
  if (blockIdx.x == 0 && threadIdx.y == 0 && running.mean != nullptr) {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      float &mean = running.mean[first + i], &kept = running.variance[first + i];
      mean += running.momentum * (statistics.mean[i] - mean);
      kept += running.momentum * (statistics.variance[i] * (statistics.count / (statistics.count - 1)) - kept);
    }
  }
  const int64_t step = int64_t(gridDim.x) * blockDim.y;
  for (int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y; row < rows; row += kTogether * step) {
    Channels<T, V> values[kTogether], more[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      const int64_t at = (row + j * step) * channels + first;
      if (row + j * step < rows) values[j] = Channels<T, V>::load(x + at);
      if (with_plus && row + j * step < rows) more[j] = Channels<T, V>::load(plus + at);
    }
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      float result[V];
#pragma unroll
      for (int i = 0; i < V; ++i) result[i] = activate<kind>(line(values[j][i], i) + (with_plus ? more[j][i] : 0.0f));
      if (row + j * step < rows) store(y + (row + j * step) * channels + first, result);
    }
  }
}

// by_x = scale * (g - mean(g) - n * mean(g * n)), where n is the normalised x: an affine function of g and x.
template <class T, Activation kind> __global__ void __launch_bounds__(kThreads)
    backward(const T* __restrict__ x, const T* __restrict__ grad, const float* sums, Norm norm, int64_t rows, int channels,
             T* __restrict__ by_x) {
  constexpr int V = kWidth<T>;
  const int first = (blockIdx.y * blockDim.x + threadIdx.x) * V;
  if (first >= channels) return;
  float of_x[V], constant[V];
  const Statistics<V> statistics(norm, channels, first);
  const Line<V> line(statistics, norm, first);
  load_floats(constant, sums + first);
  load_floats(of_x, sums + channels + first);
  const float count = statistics.count / norm.processes;  // because `sums` are averaged over processes
#pragma unroll
  for (int i = 0; i < V; ++i) {
    const float inverse = rsqrtf(statistics.variance[i] + norm.eps);
    of_x[i] *= -line.scale[i] * inverse / count;
    constant[i] = -line.scale[i] * constant[i] / count - statistics.mean[i] * of_x[i];
  }
  const int64_t step = int64_t(gridDim.x) * blockDim.y;
  for (int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y; row < rows; row += kTogether * step) {
    Channels<T, V> values[kTogether], above[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      const int64_t at = (row + j * step) * channels + first;
      if (row + j * step < rows) values[j] = Channels<T, V>::load(x + at), above[j] = Channels<T, V>::load(grad + at);
    }
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      float result[V];
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const float g = above[j][i] * slope<kind>(line(values[j][i], i));
        result[i] = fmaf(line.scale[i], g, fmaf(values[j][i], of_x[i], constant[i]));
      }
      if (row + j * step < rows) store(by_x + (row + j * step) * channels + first, result);
    }
  }
}

template <class T> struct Run {
  static const T* as(const void* values) { return static_cast<const T*>(values); }

  template <Activation kind> static const char* norm(const Rows& x, const void* plus, const Norm& norm, const Running& running,
                                                     void* y, cudaStream_t stream) {
    const Grid grid = grid_of<T>(x, kMaxBlocksToWrite);
    const auto run = plus == nullptr ? normalise<T, kind, false> : normalise<T, kind, true>;
    run<<<grid.blocks, grid.threads, 0, stream>>>(as(x.values), as(plus), norm, running, x.rows, int(x.channels),
                                                  static_cast<T*>(y));
    return launch_error();
  }

  template <Activation kind> static const char* sums(const Rows& x, const void* grad, const void* other, const Norm& norm,
                                                     float* partial, float* result, void* g, cudaStream_t stream) {
    using Alone = GradientSums<T, kind, false>;
    using Other = GradientSums<T, kind, true>;
    if (other == nullptr)
      return sum_rows<T, Alone>(x, {as(x.values), as(grad), nullptr, nullptr, norm}, partial, nullptr, result, stream);
    return sum_rows<T, Other>(x, {as(x.values), as(grad), as(other), static_cast<T*>(g), norm}, partial, nullptr, result,
                              stream);
  }

  template <Activation kind> static const char* gradient(const Rows& x, const void* grad, const float* sums, const Norm& norm,
                                                         void* by_x, cudaStream_t stream) {
    const Grid grid = grid_of<T>(x, kMaxBlocksToWrite);
    backward<T, kind><<<grid.blocks, grid.threads, 0, stream>>>(as(x.values), as(grad), sums, norm, x.rows, int(x.channels),
                                                                static_cast<T*>(by_x));
    return launch_error();
  }
};

template <class Call> const char* with_activation(Activation kind, Call call) {
  switch (kind) {
    case Activation::relu:
      return call(std::integral_constant<Activation, Activation::relu>());
    case Activation::silu:
      return call(std::integral_constant<Activation, Activation::silu>());
    default:
      return call(std::integral_constant<Activation, Activation::none>());
  }
}

}  // namespace

const char* channel_statistics(const Rows& x, float* partial, float* statistics, void* stream) {
  return with_kind(x.type, [&](auto t) {
    using T = decltype(t);
    return sum_rows<T, Moments<T>>(x, {static_cast<const T*>(x.values)}, partial, static_cast<const T*>(x.values), statistics,
                                   static_cast<cudaStream_t>(stream));
  });
}

const char* channel_norm(const Rows& x, const void* plus, const Norm& norm, const Running& running, void* y, void* stream) {
  return with_kind(x.type, [&](auto t) {
    return with_activation(norm.activation, [&](auto kind) {
      return Run<decltype(t)>::template norm<decltype(kind)::value>(x, plus, norm, running, y,
                                                                    static_cast<cudaStream_t>(stream));
    });
  });
}

const char* channel_norm_sums(const Rows& x, const void* grad, const void* other, const Norm& norm, float* partial, float* sums,
                              void* g, void* stream) {
  return with_kind(x.type, [&](auto t) {
    return with_activation(norm.activation, [&](auto kind) {
      return Run<decltype(t)>::template sums<decltype(kind)::value>(x, grad, other, norm, partial, sums, g,
                                                                    static_cast<cudaStream_t>(stream));
    });
  });
}

const char* channel_norm_backward(const Rows& x, const void* grad, const float* sums, const Norm& norm, void* by_x,
                                  void* stream) {
  return with_kind(x.type, [&](auto t) {
    return with_activation(norm.activation, [&](auto kind) {
      return Run<decltype(t)>::template gradient<decltype(kind)::value>(x, grad, sums, norm, by_x,
                                                                        static_cast<cudaStream_t>(stream));
    });
  });
}

}  // namespace rtdetr::cuda
