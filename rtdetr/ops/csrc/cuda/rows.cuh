// What the kernels over rows of channels share: 16 bytes of a row to a thread, and the last step of sums over rows.
#pragma once

#include <type_traits>

#include "common.cuh"

namespace rtdetr::cuda {

constexpr int kLanes = 32, kFinishRows = 16;

template <class T> constexpr int kWidth = 16 / sizeof(T);

template <class T> __device__ __forceinline__ void store(T* address, const float (&values)[kWidth<T>]) {
  uint4 raw;
#pragma unroll
  for (int i = 0; i < kWidth<T>; ++i) reinterpret_cast<T*>(&raw)[i] = narrow<T>(values[i]);
  *reinterpret_cast<uint4*>(address) = raw;
}

// Sums of the blocks; where `x` is given, the moments about its first row become mean and variance.
template <class T>
__global__ void __launch_bounds__(kLanes* kFinishRows)
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
    b = b < 0 ? 0 : b;  // NaN stays
    a = widen(x[channel]) + away;
    if (channel == 0) result[2 * channels] = rows;
  }
  result[channel] = a;
  result[channels + channel] = b;
}

// The sums (2, channels) of partial (blocks, 2, channels); with `x`, whose first row they are about, mean and variance.
template <class T>
const char* finish_sums(const float* partial, unsigned blocks, int64_t channels, const T* x, int64_t rows, float* result,
                        cudaStream_t stream) {
  finish<T><<<unsigned((channels + kLanes - 1) / kLanes), dim3(kLanes, kFinishRows), 0, stream>>>(partial, int(blocks), int(channels), x,
                                                                                              float(rows), result);
  return launch_error();
}

template <class Call> const char* with_kind(DType type, Call call) {
  switch (type) {
    case DType::f16: return call(__half());
    case DType::bf16: return call(__nv_bfloat16());
    case DType::f32: return call(float());
    default: return "float64 has no kernel";
  }
}

}  // namespace rtdetr::cuda
