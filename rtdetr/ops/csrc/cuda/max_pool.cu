// Max pooling after the stem. A thread owns 16 bytes of channels of one cell. Forward: a cell of the output, for which it
// stores one byte per value, the position of the maximum. Backward: a cell of the input, which is in up to four windows.
#include "../max_pool.h"
#include "rows.cuh"

namespace rtdetr::cuda {
namespace {

template <int V> struct alignas(V) Taken {
  uint8_t of[V];
};

template <class T> __global__ void __launch_bounds__(kThreads)
    forward(const T* __restrict__ x, Pool pool, unsigned vectors, T* __restrict__ y, uint8_t* __restrict__ place) {
  constexpr int V = kWidth<T>;
  const unsigned at = blockIdx.x * kThreads + threadIdx.x;
  if (at >= vectors) return;
  const unsigned per_cell = unsigned(pool.channels) / V, out_height = unsigned(pool.out_height),
                 out_width = unsigned(pool.out_width);
  const int height = int(pool.height), width = int(pool.width), first = int(at % per_cell) * V;
  const unsigned cell = at / per_cell;
  const int column = int(cell % out_width), row = int(cell / out_width % out_height);
  const T* image = x + int64_t(cell / (out_width * out_height)) * height * width * pool.channels + first;
  float best[V];
  Taken<V> taken;
#pragma unroll
  for (int i = 0; i < V; ++i) best[i] = -INFINITY, taken.of[i] = 4;
#pragma unroll
  for (int window = 0; window < 9; ++window) {
    const int r = 2 * row - 1 + window / 3, c = 2 * column - 1 + window % 3;
    if (r < 0 || r >= height || c < 0 || c >= width) continue;
    const auto values = Channels<T, V>::load(image + (int64_t(r) * width + c) * pool.channels);
#pragma unroll
    for (int i = 0; i < V; ++i)
      if (values[i] > best[i] || values[i] != values[i]) best[i] = values[i], taken.of[i] = window;  // keeps NaN
  }
  store(y + int64_t(at) * V, best);
  *reinterpret_cast<Taken<V>*>(place + int64_t(at) * V) = taken;
}

template <class T> __global__ void __launch_bounds__(kThreads)
    backward(const T* __restrict__ grad, const uint8_t* __restrict__ place, Pool pool, unsigned vectors, T* __restrict__ by_x) {
  constexpr int V = kWidth<T>;
  const unsigned at = blockIdx.x * kThreads + threadIdx.x;
  if (at >= vectors) return;
  const unsigned per_cell = unsigned(pool.channels) / V, height = unsigned(pool.height), width = unsigned(pool.width);
  const int out_height = int(pool.out_height), out_width = int(pool.out_width), first = int(at % per_cell) * V;
  const unsigned cell = at / per_cell;
  const int column = int(cell % width), row = int(cell / width % height);
  const int64_t image = int64_t(cell / (width * height)) * out_height * out_width;
  float result[V] = {};
  for (int r = row / 2; r <= (row + 1) / 2 && r < out_height; ++r) {
    for (int c = column / 2; c <= (column + 1) / 2 && c < out_width; ++c) {
      const int window = (row - 2 * r + 1) * 3 + column - 2 * c + 1;
      const int64_t there = (image + int64_t(r) * out_width + c) * pool.channels + first;
      const auto above = Channels<T, V>::load(grad + there);
      const auto taken = *reinterpret_cast<const Taken<V>*>(place + there);
#pragma unroll
      for (int i = 0; i < V; ++i) result[i] += taken.of[i] == window ? above[i] : 0.0f;
    }
  }
  store(by_x + int64_t(at) * V, result);
}

unsigned blocks_for(int64_t vectors) { return unsigned((vectors + kThreads - 1) / kThreads); }

}  // namespace

const char* max_pool(const Pool& pool, const void* x, void* y, uint8_t* place, void* stream) {
  return with_kind(pool.type, [&](auto t) {
    using T = decltype(t);
    const int64_t vectors = pool.images * pool.out_height * pool.out_width * pool.channels / kWidth<T>;
    forward<T><<<blocks_for(vectors), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<const T*>(x), pool, unsigned(vectors), static_cast<T*>(y), place);
    return launch_error();
  });
}

const char* max_pool_backward(const Pool& pool, const void* grad, const uint8_t* place, void* by_x, void* stream) {
  return with_kind(pool.type, [&](auto t) {
    using T = decltype(t);
    const int64_t vectors = pool.images * pool.height * pool.width * pool.channels / kWidth<T>;
    backward<T><<<blocks_for(vectors), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(static_cast<const T*>(grad), place,
                                                                                         pool, vectors, static_cast<T*>(by_x));
    return launch_error();
  });
}

}  // namespace rtdetr::cuda
