// The k largest values of every row, in descending order; of equal values, the one with the lowest index first. One block
// per row; its values stay in registers. A lower bound that few enough values reach is found bit by bit, with one count
// over the block per bit; the values that reach it are sorted. For rows of thousands of values this is one short kernel,
// where a general selection takes several.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "../top_k.h"

namespace rtdetr::cuda {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32;
constexpr int kIndexBits = 15;  // bits of an index into a row
constexpr unsigned kFullWarp = 0xffffffffu;
static_assert(kMaxTopKRow == 1 << kIndexBits && kMaxTopKRow % kThreads == 0 && kMaxTopK <= kThreads);

// Unsigned keys with the same order as the values; NaN is the largest, as in torch.topk. No value has the key 0.
template <class T>
struct Key;

template <>
struct Key<float> {
  static constexpr int kBits = 32;
  static __device__ unsigned of(float value) {
    const unsigned bits = __float_as_uint(value + 0.0f);  // -0 becomes 0
    return value != value ? 0xffffffffu : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  }
  static __device__ float value(unsigned key) { return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }
};

template <>
struct Key<__half> {
  static constexpr int kBits = 16;
  static __device__ unsigned of(__half value) {
    const unsigned bits = __half_as_ushort(__hadd(value, __ushort_as_half(0)));  // -0 becomes 0
    return __hisnan(value) ? 0xffffu : bits & 0x8000u ? ~bits & 0xffffu : bits | 0x8000u;
  }
  static __device__ __half value(unsigned key) {
    return __ushort_as_half(static_cast<unsigned short>(key & 0x8000u ? key & 0x7fffu : ~key));
  }
};

__device__ __forceinline__ int sum_of_warp(int mine) {
#if __CUDA_ARCH__ >= 800
  return __reduce_add_sync(kFullWarp, mine);
#else
  for (int step = 16; step > 0; step /= 2) mine += __shfl_xor_sync(kFullWarp, mine, step);
  return mine;
#endif
}

// The sum over the block, in every thread. Successive calls alternate between two `slots`: one barrier each is enough.
__device__ __forceinline__ int sum_of_block(int mine, int (*slots)[kWarps], int turn) {
  mine = sum_of_warp(mine);
  if (threadIdx.x % 32 == 0) slots[turn & 1][threadIdx.x / 32] = mine;
  __syncthreads();
  return sum_of_warp(slots[turn & 1][threadIdx.x % 32]);
}

// Bitonic sort of the values of threads 0 to slots - 1, in descending order; the other threads hold 0. Values of one warp
// are exchanged by shuffles, others through `places`: successive steps alternate between its two halves.
__device__ __forceinline__ unsigned long long sorted(unsigned long long mine, int slots, unsigned long long (*places)[kMaxTopK]) {
  const int t = threadIdx.x;
  int turn = 0;
  for (int size = 2; size <= slots; size *= 2) {
    for (int stride = size / 2; stride > 0; stride /= 2) {
      unsigned long long other;
      if (stride < 32) {
        other = __shfl_xor_sync(kFullWarp, mine, stride);
      } else {
        places[turn & 1][t] = mine;
        __syncthreads();
        other = places[turn++ & 1][t ^ stride];
      }
      const bool larger = ((t & stride) == 0) == ((t & size) == 0);
      mine = larger == (mine > other) ? mine : other;
    }
  }
  return mine;
}

template <class T, int kEach>  // kEach: values per thread, at threadIdx.x + j * kThreads
__global__ void __launch_bounds__(kThreads) top_k_of_rows(const T* values, int n, int k, int slots, T* best, int64_t* index) {
  __shared__ int sums[2][kWarps];
  __shared__ unsigned long long found[kMaxTopK], places[2][kMaxTopK];
  __shared__ int num_found;
  const T* row = values + static_cast<int64_t>(blockIdx.x) * n;
  const int t = threadIdx.x;
  if (t == 0) num_found = 0;
  if (t < slots) found[t] = 0;
  __syncthreads();
  unsigned keys[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) keys[j] = t + j * kThreads < n ? Key<T>::of(row[t + j * kThreads]) : 0;
  int turn = 0, reaching = n;
  unsigned bound = 0;  // the leading bits of the k-th largest key, until at most `slots` keys reach it
  for (int bit = Key<T>::kBits - 1; bit >= 0 && reaching > slots; --bit) {
    const unsigned trial = bound | 1u << bit;
    int mine = 0;
#pragma unroll
    for (int j = 0; j < kEach; ++j) mine += keys[j] >= trial;
    const int all = sum_of_block(mine, sums, turn++);
    if (all >= k) bound = trial, reaching = all;
  }
  int last = n - 1;  // keys equal to the bound are taken up to this index
  if (reaching > slots) {
    int equal = 0;
#pragma unroll
    for (int j = 0; j < kEach; ++j) equal += keys[j] == bound;
    const int wanted = k - (reaching - sum_of_block(equal, sums, turn++));
    last = 0;
    for (int bit = kIndexBits - 1; bit >= 0; --bit) {
      const int trial = last | 1 << bit;
      int mine = 0;
#pragma unroll
      for (int j = 0; j < kEach; ++j) mine += keys[j] == bound && t + j * kThreads < trial;
      if (sum_of_block(mine, sums, turn++) < wanted) last = trial;
    }
  }
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int i = t + j * kThreads;
    if (keys[j] > bound || (keys[j] == bound && i <= last))
      found[atomicAdd(&num_found, 1)] = static_cast<unsigned long long>(keys[j]) << 32 | (0xffffffffu - i);
  }
  __syncthreads();
  const unsigned long long mine = sorted(t < slots ? found[t] : 0, slots, places);
  if (t < k) {
    const int64_t at = static_cast<int64_t>(blockIdx.x) * k + t;
    best[at] = Key<T>::value(static_cast<unsigned>(mine >> 32));
    index[at] = 0xffffffffu - static_cast<unsigned>(mine);
  }
}

template <class T>
void launch(const TopK& problem, cudaStream_t stream) {
  int slots = 2;
  while (slots < problem.k) slots *= 2;
  const int n = static_cast<int>(problem.n), k = static_cast<int>(problem.k), each = (n + kThreads - 1) / kThreads;
  const auto run = each <= 4 ? top_k_of_rows<T, 4> : each <= 12 ? top_k_of_rows<T, 12> : each <= 24 ? top_k_of_rows<T, 24>
                                                                                       : top_k_of_rows<T, 32>;
  run<<<static_cast<unsigned>(problem.rows), kThreads, 0, stream>>>(static_cast<const T*>(problem.values), n, k, slots,
                                                                  static_cast<T*>(problem.best), problem.index);
}

}  // namespace

const char* top_k(const TopK& problem, void* stream) {
  if (problem.is_half) launch<__half>(problem, static_cast<cudaStream_t>(stream));
  else launch<float>(problem, static_cast<cudaStream_t>(stream));
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace rtdetr::cuda
