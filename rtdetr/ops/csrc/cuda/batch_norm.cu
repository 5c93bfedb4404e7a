// Batch norm, the sum with another map and an activation, of maps with channels last, forwards and backwards.
//
// A thread owns 16 bytes of channels and walks down rows; neighbouring threads own neighbouring channels, and those above
// one another other rows. Sums over rows are made in the registers of a thread, then of a block, then, in a fixed order,
// of all blocks: the same numbers in every run. All of them are passes at the speed of memory: one over x for the
// statistics, x -> y; x, dy for the sums of the gradient, and x, dy -> dx. What lies between norm and activation is
// computed again instead of kept.
#include "../batch_norm.h"
#include "rows.cuh"

namespace rtdetr::cuda {
namespace {

// Of channels first, first + 1, ...
template <int V> struct Affine {
  float mean[V], inverse[V], scale[V], bias[V];
  float count;

  __device__ __forceinline__ Affine(const Norm& norm, int channels, int first, float (&variance)[V]) {
    const int64_t stride = 2 * channels + 1;
    count = 0;
    for (int p = 0; p < norm.processes; ++p) count += norm.statistics[p * stride + 2 * channels];
#pragma unroll
    for (int i = 0; i < V; ++i) {
      mean[i] = variance[i] = 0;
      for (int p = 0; p < norm.processes; ++p) {
        const float* own = norm.statistics + p * stride;
        mean[i] += own[first + i] * (own[2 * channels] / count);
      }
      for (int p = 0; p < norm.processes; ++p) {
        const float* own = norm.statistics + p * stride;
        const float away = own[first + i] - mean[i];
        variance[i] += (own[channels + first + i] + away * away) * (own[2 * channels] / count);
      }
      inverse[i] = rsqrtf(variance[i] + norm.eps);
      scale[i] = norm.weight[first + i] * inverse[i];
      bias[i] = norm.bias[first + i];
    }
  }

  __device__ __forceinline__ float operator()(float x, int i) const { return fmaf(x - mean[i], scale[i], bias[i]); }
};

template <Activation kind> __device__ __forceinline__ float activate(float z) {
  if constexpr (kind == Activation::relu) return z < 0 ? 0.0f : z;  // NaN stays
  if constexpr (kind == Activation::silu) return z / (1 + __expf(-z));
  return z;
}

template <Activation kind> __device__ __forceinline__ float slope(float z) {
  if constexpr (kind == Activation::relu) return z <= 0 ? 0.0f : 1.0f;
  if constexpr (kind == Activation::silu) {
    const float s = 1 / (1 + __expf(-z));
    return s * (1 + z * (1 - s));
  }
  return 1;
}

// Moments about the first row: near enough to the mean that no digits are lost.
template <class T> struct Moments {
  static constexpr int V = kWidth<T>;
  struct Inputs { const T* x; };
  float about[V];

  __device__ __forceinline__ Moments(const Inputs& inputs, int, int first) {
    const auto values = Channels<T, V>::load(inputs.x + first);
#pragma unroll
    for (int i = 0; i < V; ++i) about[i] = values[i];
  }
  __device__ __forceinline__ void add(const Inputs& inputs, int64_t at, float (&a)[V], float (&b)[V]) const {
    const auto values = Channels<T, V>::load(inputs.x + at);
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const float away = values[i] - about[i];
      a[i] += away;
      b[i] = fmaf(away, away, b[i]);
    }
  }
};

template <class T, Activation kind, bool with_other> struct GradientSums {
  static constexpr int V = kWidth<T>;
  struct Inputs {
    const T *x, *grad, *other;
    T* g;
    Norm norm;
  };
  float unused[V];
  const Affine<V> affine;

  __device__ __forceinline__ GradientSums(const Inputs& inputs, int channels, int first)
      : affine(inputs.norm, channels, first, unused) {}
  __device__ __forceinline__ void add(const Inputs& inputs, int64_t at, float (&a)[V], float (&b)[V]) const {
    const auto x = Channels<T, V>::load(inputs.x + at);
    const auto grad = Channels<T, V>::load(inputs.grad + at);
    float g[V];
    if constexpr (with_other) {
      const auto other = Channels<T, V>::load(inputs.other + at);
#pragma unroll
      for (int i = 0; i < V; ++i) g[i] = grad[i] * slope<kind>(kind == Activation::relu ? other[i] : affine(x[i], i) + other[i]);
      store(inputs.g + at, g);
    } else {
#pragma unroll
      for (int i = 0; i < V; ++i) g[i] = grad[i] * slope<kind>(affine(x[i], i));
    }
#pragma unroll
    for (int i = 0; i < V; ++i) {
      a[i] += g[i];
      b[i] = fmaf(g[i], (x[i] - affine.mean[i]) * affine.inverse[i], b[i]);
    }
  }
};

template <class T, Activation kind>
__global__ void __launch_bounds__(kThreads)
    normalise(const T* __restrict__ x, const T* __restrict__ plus, Norm norm, Running running, int64_t rows, int channels, T* __restrict__ y) {
  constexpr int V = kWidth<T>;
  const int first = (blockIdx.y * blockDim.x + threadIdx.x) * V;
  if (first >= channels) return;
  float variance[V];
  const Affine<V> affine(norm, channels, first, variance);
  if (blockIdx.x == 0 && threadIdx.y == 0 && running.mean != nullptr) {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      float &mean = running.mean[first + i], &kept = running.variance[first + i];
      mean += running.momentum * (affine.mean[i] - mean);
      kept += running.momentum * (variance[i] * (affine.count / (affine.count - 1)) - kept);
    }
  }
  const int64_t step = int64_t(gridDim.x) * blockDim.y;
  for (int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y; row < rows; row += step) {
    const int64_t at = row * channels + first;
    const auto values = Channels<T, V>::load(x + at);
    float result[V];
    if (plus != nullptr) {
      const auto more = Channels<T, V>::load(plus + at);
#pragma unroll
      for (int i = 0; i < V; ++i) result[i] = activate<kind>(affine(values[i], i) + more[i]);
    } else {
#pragma unroll
      for (int i = 0; i < V; ++i) result[i] = activate<kind>(affine(values[i], i));
    }
    store(y + at, result);
  }
}

template <class T, Activation kind>
__global__ void __launch_bounds__(kThreads)
    backward(const T* __restrict__ x, const T* __restrict__ grad, const float* sums, Norm norm, int64_t rows, int channels, T* __restrict__ by_x) {
  constexpr int V = kWidth<T>;
  const int first = (blockIdx.y * blockDim.x + threadIdx.x) * V;
  if (first >= channels) return;
  float of_g[V], of_product[V];
  const Affine<V> affine(norm, channels, first, of_g);  // the variance is not needed
#pragma unroll
  for (int i = 0; i < V; ++i) {
    of_g[i] = sums[first + i] / affine.count;
    of_product[i] = sums[channels + first + i] / affine.count;
  }
  const int64_t step = int64_t(gridDim.x) * blockDim.y;
  for (int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y; row < rows; row += step) {
    const int64_t at = row * channels + first;
    const auto values = Channels<T, V>::load(x + at);
    const auto above = Channels<T, V>::load(grad + at);
    float result[V];
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const float g = above[i] * slope<kind>(affine(values[i], i));
      const float normal = (values[i] - affine.mean[i]) * affine.inverse[i];
      result[i] = affine.scale[i] * (g - of_g[i] - normal * of_product[i]);
    }
    store(by_x + at, result);
  }
}

template <class T> struct Run {
  static const T* as(const void* values) { return static_cast<const T*>(values); }

  template <Activation kind>
  static const char* norm(const Rows& x, const void* plus, const Norm& norm, const Running& running, void* y, cudaStream_t stream) {
    const Grid grid = grid_of<T>(x, 4, 132 * 16);
    normalise<T, kind><<<grid.blocks, grid.threads, 0, stream>>>(as(x.values), as(plus), norm, running, x.rows, int(x.channels),
                                                                static_cast<T*>(y));
    return launch_error();
  }

  template <Activation kind>
  static const char* sums(const Rows& x, const void* grad, const void* other, const Norm& norm, float* partial, float* result, void* g,
                          cudaStream_t stream) {
    if (other == nullptr) return sum_rows<T, GradientSums<T, kind, false>>(x, {as(x.values), as(grad), nullptr, nullptr, norm}, partial, nullptr, result, stream);
    return sum_rows<T, GradientSums<T, kind, true>>(x, {as(x.values), as(grad), as(other), static_cast<T*>(g), norm}, partial, nullptr, result, stream);
  }

  template <Activation kind>
  static const char* gradient(const Rows& x, const void* grad, const float* sums, const Norm& norm, void* by_x, cudaStream_t stream) {
    const Grid grid = grid_of<T>(x, 4, 132 * 16);
    backward<T, kind><<<grid.blocks, grid.threads, 0, stream>>>(as(x.values), as(grad), sums, norm, x.rows, int(x.channels),
                                                               static_cast<T*>(by_x));
    return launch_error();
  }
};

template <class Call> const char* with_activation(Activation kind, Call call) {
  switch (kind) {
    case Activation::relu: return call(std::integral_constant<Activation, Activation::relu>());
    case Activation::silu: return call(std::integral_constant<Activation, Activation::silu>());
    default: return call(std::integral_constant<Activation, Activation::none>());
  }
}

}  // namespace

const char* channel_statistics(const Rows& x, float* partial, float* statistics, void* stream) {
  return with_kind(x.type, [&](auto t) {
    using T = decltype(t);
    return sum_rows<T, Moments<T>>(x, {static_cast<const T*>(x.values)}, partial, static_cast<const T*>(x.values), statistics, static_cast<cudaStream_t>(stream));
  });
}

const char* channel_norm(const Rows& x, const void* plus, const Norm& norm, const Running& running, void* y, void* stream) {
  return with_kind(x.type, [&](auto t) {
    return with_activation(norm.activation, [&](auto kind) {
      return Run<decltype(t)>::template norm<decltype(kind)::value>(x, plus, norm, running, y, static_cast<cudaStream_t>(stream));
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

const char* channel_norm_backward(const Rows& x, const void* grad, const float* sums, const Norm& norm, void* by_x, void* stream) {
  return with_kind(x.type, [&](auto t) {
    return with_activation(norm.activation, [&](auto kind) {
      return Run<decltype(t)>::template gradient<decltype(kind)::value>(x, grad, sums, norm, by_x, static_cast<cudaStream_t>(stream));
    });
  });
}

}  // namespace rtdetr::cuda
