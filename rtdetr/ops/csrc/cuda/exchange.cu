// A block sends each float together with the number of the exchange, eight bytes that arrive at once: who finds the number
// has the float, and nothing else has to be waited for. Two exchanges have places of their own in turn. That is enough: a
// process begins exchange e + 2 when e + 1 is complete, for which every other one must have left e.
#include "../exchange.h"

#include <cuda_runtime.h>

#include <cstring>

namespace rtdetr::cuda {
namespace {

constexpr int kThreads = 512;

__device__ void send(uint64_t* place, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(place), "l"(value) : "memory");
}

__device__ uint64_t look(const uint64_t* place) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(place) : "memory");
  return value;
}

__device__ uint64_t nanoseconds() {
  uint64_t time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}

__device__ float receive(const uint64_t* place, uint32_t number, uint64_t patience) {
  uint64_t found = look(place);
  if (static_cast<uint32_t>(found >> 32) == number) return __uint_as_float(static_cast<uint32_t>(found));
  const uint64_t start = nanoseconds();
  while (static_cast<uint32_t>(found >> 32) != number) {
    if (nanoseconds() - start > patience) return __uint_as_float(0x7fffffff);
    found = look(place);
  }
  return __uint_as_float(static_cast<uint32_t>(found));
}

__global__ void __launch_bounds__(kThreads) exchange_kernel(Exchange among, const float* own, int count, bool mean,
                                                                uint64_t patience, float* result) {
  const uint32_t number = *among.done + 1;
  const int64_t start = (number & 1) * among.processes * kMaxExchanged;
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const uint64_t sent = static_cast<uint64_t>(number) << 32 | __float_as_uint(own[i]);
    for (int process = 0; process < among.processes; ++process)
      if (process != among.rank) send(among.inboxes[process] + start + among.rank * kMaxExchanged + i, sent);
  }
  const uint64_t* inbox = among.inboxes[among.rank] + start;
  for (int i = threadIdx.x; i < count; i += kThreads) {
    float sum = 0;  // in the order of the processes, so that all get the same bits
    for (int process = 0; process < among.processes; ++process) {
      const float value = process == among.rank ? own[i] : receive(inbox + process * kMaxExchanged + i, number, patience);
      if (!mean) result[static_cast<int64_t>(process) * count + i] = value;
      sum += value;
    }
    if (mean) result[i] = sum / static_cast<float>(among.processes);
  }
  __syncthreads();
  if (threadIdx.x == 0) *among.done = number;
}

const char* sentence(cudaError_t error) {
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();  // or the next launch would find it
  return cudaGetErrorString(error);
}

}  // namespace

const char* make_inbox(int64_t processes, void** inbox, uint8_t* handle) {
  static_assert(sizeof(cudaIpcMemHandle_t) == kHandleBytes);
  cudaIpcMemHandle_t own;
  cudaError_t error = cudaMalloc(inbox, inbox_bytes(processes));
  if (error == cudaSuccess) error = cudaMemset(*inbox, 0, inbox_bytes(processes));
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  if (error == cudaSuccess) error = cudaIpcGetMemHandle(&own, *inbox);
  if (error == cudaSuccess) std::memcpy(handle, &own, kHandleBytes);
  return sentence(error);
}

const char* open_inbox(const uint8_t* handle, void** inbox) {
  cudaIpcMemHandle_t other;
  std::memcpy(&other, handle, kHandleBytes);
  return sentence(cudaIpcOpenMemHandle(inbox, other, cudaIpcMemLazyEnablePeerAccess));
}

const char* exchange(const Exchange& among, const float* own, int64_t count, bool mean, int64_t seconds, float* result,
                     void* stream) {
  const auto nanoseconds = static_cast<uint64_t>(seconds) * 1000 * 1000 * 1000;
  exchange_kernel<<<1, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(among, own, static_cast<int>(count), mean, nanoseconds,
                                                                         result);
  return sentence(cudaGetLastError());
}

}  // namespace rtdetr::cuda
