// Sums by atomic reductions in global memory. Those of 16-bit values are float too, and rounded once at the end.
#pragma once

#include "common.cuh"

namespace rtdetr::cuda {

// Adds V sums to global memory, with 16 bytes per instruction if the device supports it.
template <int V, class A> __device__ __forceinline__ void reduce_add(A* address, const A (&sums)[V]) {
#if __CUDA_ARCH__ >= 900
  if constexpr (V == 4) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(sums[0]), "f"(sums[1]),
                 "f"(sums[2]), "f"(sums[3])
                 : "memory");
  } else
#endif
  {
#pragma unroll
    for (int i = 0; i < V; ++i) atomicAdd(address + i, sums[i]);
  }
}

// Rounds float sums to 16-bit values: eight at a time, the rest one by one.
template <class T> __global__ void __launch_bounds__(256) cast_kernel(const float* sums, T* output, int64_t count) {
  const int64_t first = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * 8;
  if (first + 8 <= count) {
    const auto low = Channels<float, 4>::load(sums + first), high = Channels<float, 4>::load(sums + first + 4);
    const float values[8] = {low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3]};
    Channels<T, 8>::store(output + first, values);
  } else {
    for (int64_t i = first; i < count; ++i) output[i] = narrow<T>(sums[i]);
  }
}

}  // namespace rtdetr::cuda
