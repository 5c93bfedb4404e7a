// Shared by the kernels over rows of channels: 16 bytes of a row per thread, and reductions over rows.
#pragma once

#include <type_traits>

#include "../rows.h"
#include "common.cuh"

namespace rtdetr::cuda {

constexpr int kLanes = 32, kThreads = 256, kFinishRows = 16;
constexpr int kTogether = 4;  // rows that a thread loads before it uses the first, to hide latency

template <class T> constexpr int kWidth = 16 / sizeof(T);

template <class T> __device__ __forceinline__ void store(T* address, const float (&values)[kWidth<T>]) {
  uint4 raw;
#pragma unroll
  for (int i = 0; i < kWidth<T>; ++i) reinterpret_cast<T*>(&raw)[i] = narrow<T>(values[i]);
  *reinterpret_cast<uint4*>(address) = raw;
}

// Two sums over rows for each channel and block: partial (blocks, 2, channels). A `Terms` object handles V channels: it
// loads what it needs of a row, and accumulates it.
template <class T, class Terms> __global__ void __launch_bounds__(kThreads)
    sum_blocks(typename Terms::Inputs inputs, int64_t rows, int channels, float* partial) {
  constexpr int V = kWidth<T>;
  __shared__ float shared[2 * V][kThreads];
  const int first = (blockIdx.y * blockDim.x + threadIdx.x) * V;
  const bool mine = first < channels;
  float a[V] = {}, b[V] = {};
  if (mine) {
    const Terms terms(inputs, channels, first);
    const int64_t step = int64_t(gridDim.x) * blockDim.y;
    for (int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y; row < rows; row += kTogether * step) {
      typename Terms::Loaded loaded[kTogether];
#pragma unroll
      for (int j = 0; j < kTogether; ++j)
        if (row + j * step < rows) loaded[j] = Terms::load(inputs, (row + j * step) * channels + first);
#pragma unroll
      for (int j = 0; j < kTogether; ++j)
        if (row + j * step < rows) terms.add(inputs, (row + j * step) * channels + first, loaded[j], a, b);
    }
    terms.close(b);
  }
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  for (int left = blockDim.y; left > 1; left = (left + 1) / 2) {
#pragma unroll
    for (int i = 0; i < V; ++i) shared[i][thread] = a[i], shared[V + i][thread] = b[i];
    __syncthreads();
    const int half = (left + 1) / 2;
    if (threadIdx.y < left / 2) {
      const int other = thread + half * blockDim.x;
#pragma unroll
      for (int i = 0; i < V; ++i) a[i] += shared[i][other], b[i] += shared[V + i][other];
    }
    __syncthreads();
  }
  if (threadIdx.y == 0 && mine) {
    float* own = partial + int64_t(blockIdx.x) * 2 * channels + first;
#pragma unroll
    for (int i = 0; i < V; ++i) own[i] = a[i], own[channels + i] = b[i];
  }
}

// Adds up the sums of the blocks. If `x` is given, they are moments about its first row, and become mean and variance.
template <class T> __global__ void __launch_bounds__(kLanes* kFinishRows)
    finish(const float* partial, int blocks, int channels, const T* x, float rows, float* result) {
  __shared__ float shared[2][kFinishRows][kLanes];
  const int channel = blockIdx.x * kLanes + threadIdx.x;
  float a = 0, b = 0;
  if (channel < channels) {
#pragma unroll 4
    for (int block = threadIdx.y; block < blocks; block += kFinishRows) {
      a += partial[int64_t(block) * 2 * channels + channel];
      b += partial[(int64_t(block) * 2 + 1) * channels + channel];
    }
  }
  shared[0][threadIdx.y][threadIdx.x] = a;
  shared[1][threadIdx.y][threadIdx.x] = b;
  __syncthreads();
  if (threadIdx.y > 0 || channel >= channels) return;
  a = b = 0;
#pragma unroll
  for (int i = 0; i < kFinishRows; ++i) a += shared[0][i][threadIdx.x], b += shared[1][i][threadIdx.x];
  if (x != nullptr) {
    const float away = a / rows;
    b = b / rows - away * away;
    b = b < 0 ? 0 : b;  // keeps NaN
    a = widen(x[channel]) + away;
    if (channel == 0) result[2 * channels] = rows;
  }
  result[channel] = a;
  result[channels + channel] = b;
}

// Launches `finish`: partial (blocks, 2, channels) -> result (2, channels).
template <class T> const char* finish_sums(const float* partial, unsigned blocks, int64_t channels, const T* x, int64_t rows,
                                           float* result, cudaStream_t stream) {
  finish<T><<<unsigned((channels + kLanes - 1) / kLanes), dim3(kLanes, kFinishRows), 0, stream>>>(
      partial, int(blocks), int(channels), x, float(rows), result);
  return launch_error();
}

struct Grid {
  dim3 blocks, threads;
};

// At most `most` blocks in all. Fewer for small maps, so that each thread has several rows.
template <class T> inline Grid grid_of(const Rows& x, int64_t most) {
  constexpr int64_t each = 2 * kTogether;
  const int64_t vectors = x.channels / kWidth<T>, lanes = vectors < kLanes ? vectors : kLanes;
  const int64_t height = kThreads / lanes, parts = (vectors + lanes - 1) / lanes;
  int64_t blocks = (x.rows + height * each - 1) / (height * each);
  if (blocks > most / parts) blocks = most / parts;
  if (blocks < 1) blocks = 1;
  return {dim3(unsigned(blocks), unsigned(parts)), dim3(unsigned(lanes), unsigned(height))};
}

// Two sums over rows, (2, channels). If `x` is given, they are moments about its first row, and become mean and variance.
template <class T, class Terms> const char* sum_rows(const Rows& rows, const typename Terms::Inputs& inputs, float* partial,
                                                     const T* x, float* result, cudaStream_t stream) {
  const Grid grid = grid_of<T>(rows, kMaxRowBlocks);
  sum_blocks<T, Terms><<<grid.blocks, grid.threads, 0, stream>>>(inputs, rows.rows, int(rows.channels), partial);
  return finish_sums<T>(partial, grid.blocks.x, rows.channels, x, rows.rows, result, stream);
}

template <class Call> const char* with_kind(DType type, Call call) {
  switch (type) {
    case DType::f16:
      return call(__half());
    case DType::bf16:
      return call(__nv_bfloat16());
    case DType::f32:
      return call(float());
    default:
      return "float64 has no kernel";
  }
}

}  // namespace rtdetr::cuda
