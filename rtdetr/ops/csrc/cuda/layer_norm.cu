// Layer norm of a sum of tokens, forward and backward. One warp per row; the row stays in its registers, so that forward
// and backward, with the gradients of weight and bias, each take one pass over memory.
#include "../layer_norm.h"
#include "rows.cuh"

namespace rtdetr::cuda {
namespace {

constexpr int kWarps = 8;

__device__ __forceinline__ float sum_of_warp(float mine) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) mine += __shfl_xor_sync(kFullWarp, mine, step);
  return mine;
}

// A row in registers: kParts times 16 bytes per lane.
template <class T, int kParts> struct Token {
  static constexpr int V = kWidth<T>;
  float values[kParts][V];
  float mean, inverse;

  static __device__ __forceinline__ int channel(int part) { return (part * kLanes + threadIdx.x) * V; }

  __device__ __forceinline__ void load(const T* row, int channels) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const bool mine = channel(part) < channels;
      Channels<T, V> raw{};
      if (mine) raw = Channels<T, V>::load(row + channel(part));
#pragma unroll
      for (int i = 0; i < V; ++i) values[part][i] = mine ? raw[i] : 0.0f;
    }
  }
  __device__ __forceinline__ void measure(int channels, float eps) {
    float total = 0, squares = 0;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int i = 0; i < V; ++i) total += values[part][i];
    }
    mean = sum_of_warp(total) / channels;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (channel(part) >= channels) continue;
#pragma unroll
      for (int i = 0; i < V; ++i) squares += (values[part][i] - mean) * (values[part][i] - mean);
    }
    inverse = rsqrtf(sum_of_warp(squares) / channels + eps);
  }
};

template <class T, int kParts> __global__ void __launch_bounds__(kLanes* kWarps)
    forward(const T* __restrict__ x, const T* __restrict__ plus, TokenNorm norm, int64_t rows, int channels,
            T* __restrict__ sum, T* __restrict__ y) {
  constexpr int V = kWidth<T>;
  using Row = Token<T, kParts>;
  for (int64_t row = int64_t(blockIdx.x) * kWarps + threadIdx.y; row < rows; row += int64_t(gridDim.x) * kWarps) {
    Row token;
    token.load(x + row * channels, channels);
    if (plus != nullptr) {
      Row more;
      more.load(plus + row * channels, channels);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
#pragma unroll
        for (int i = 0; i < V; ++i)  // the backward pass reads the rounded sum
          token.values[part][i] = widen(narrow<T>(token.values[part][i] + more.values[part][i]));
        if (Row::channel(part) < channels) store(sum + row * channels + Row::channel(part), token.values[part]);
      }
    }
    token.measure(channels, norm.eps);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int first = Row::channel(part);
      if (first >= channels) continue;
      float result[V];
#pragma unroll
      for (int i = 0; i < V; ++i)
        result[i] = fmaf((token.values[part][i] - token.mean) * token.inverse, norm.weight[first + i], norm.bias[first + i]);
      store(y + row * channels + first, result);
    }
  }
}

template <class T, int kParts> __global__ void __launch_bounds__(kLanes* kWarps)
    backward(const T* __restrict__ x, const T* __restrict__ grad, TokenNorm norm, int64_t rows, int channels,
             T* __restrict__ by_x, float* __restrict__ partial) {
  constexpr int V = kWidth<T>;
  using Row = Token<T, kParts>;
  float of_grad[kParts][V] = {}, of_product[kParts][V] = {}, weight[kParts][V] = {};
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    if (Row::channel(part) >= channels) continue;
#pragma unroll
    for (int i = 0; i < V; ++i) weight[part][i] = norm.weight[Row::channel(part) + i];
  }
  for (int64_t row = int64_t(blockIdx.x) * kWarps + threadIdx.y; row < rows; row += int64_t(gridDim.x) * kWarps) {
    Row token, above;
    token.load(x + row * channels, channels);
    above.load(grad + row * channels, channels);
    token.measure(channels, norm.eps);
    float a = 0, b = 0;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const float normal = (token.values[part][i] - token.mean) * token.inverse, g = above.values[part][i];
        of_grad[part][i] += g;
        of_product[part][i] = fmaf(g, normal, of_product[part][i]);
        a = fmaf(g, weight[part][i], a);
        b = fmaf(g * weight[part][i], normal, b);
      }
    }
    a = sum_of_warp(a) / channels;
    b = sum_of_warp(b) / channels;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (Row::channel(part) >= channels) continue;
      float result[V];
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const float normal = (token.values[part][i] - token.mean) * token.inverse;
        result[i] = token.inverse * (above.values[part][i] * weight[part][i] - a - normal * b);
      }
      store(by_x + row * channels + Row::channel(part), result);
    }
  }
  __shared__ float shared[2 * V][kWarps][kLanes];
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < V; ++i) {
      shared[i][threadIdx.y][threadIdx.x] = of_grad[part][i];
      shared[V + i][threadIdx.y][threadIdx.x] = of_product[part][i];
    }
    __syncthreads();
    if (Row::channel(part) >= channels) continue;
    for (int which = threadIdx.y; which < 2 * V; which += kWarps) {
      float total = 0;
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) total += shared[which][warp][threadIdx.x];
      partial[(int64_t(blockIdx.x) * 2 + which / V) * channels + Row::channel(part) + which % V] = total;
    }
  }
}

unsigned blocks_for(int64_t rows, int64_t each, int64_t most) {
  const int64_t blocks = (rows + kWarps * each - 1) / (kWarps * each);
  return unsigned(blocks < 1 ? 1 : blocks < most ? blocks : most);
}

// Calls call(integral_constant) with kParts for rows of `channels`.
template <class T, class Call> const char* with_parts(int64_t channels, Call call) {
  const int64_t parts = (channels + kLanes * kWidth<T> - 1) / (kLanes * kWidth<T>);
  if (parts == 1) return call(std::integral_constant<int, 1>());
  if (parts == 2) return call(std::integral_constant<int, 2>());
  return call(std::integral_constant<int, 4>());
}

}  // namespace

const char* token_norm(const Rows& x, const void* plus, const TokenNorm& norm, void* sum, void* y, void* stream) {
  return with_kind(x.type, [&](auto t) {
    using T = decltype(t);
    return with_parts<T>(x.channels, [&](auto parts) {
      forward<T, decltype(parts)::value>
          <<<blocks_for(x.rows, 4, 132 * 16), dim3(kLanes, kWarps), 0, static_cast<cudaStream_t>(stream)>>>(
              static_cast<const T*>(x.values), static_cast<const T*>(plus), norm, x.rows, int(x.channels), static_cast<T*>(sum),
              static_cast<T*>(y));
      return launch_error();
    });
  });
}

const char* token_norm_backward(const Rows& x, const void* grad, const TokenNorm& norm, float* partial, float* sums, void* by_x,
                                void* stream) {
  return with_kind(x.type, [&](auto t) {
    using T = decltype(t);
    return with_parts<T>(x.channels, [&](auto parts) {
      const unsigned blocks = blocks_for(x.rows, 4, kMaxRowBlocks);
      backward<T, decltype(parts)::value><<<blocks, dim3(kLanes, kWarps), 0, static_cast<cudaStream_t>(stream)>>>(
          static_cast<const T*>(x.values), static_cast<const T*>(grad), norm, x.rows, int(x.channels), static_cast<T*>(by_x),
          partial);
      return finish_sums<T>(partial, blocks, x.channels, nullptr, x.rows, sums, static_cast<cudaStream_t>(stream));
    });
  });
}

}  // namespace rtdetr::cuda
