// The border between the dispatcher (exchange.cpp) and the kernel (cuda/exchange.cu): a few floats of each process to all
// processes of a machine, whose GPUs write into one another's memory.
#pragma once

#include <cstdint>

namespace rtdetr {

constexpr int64_t kMaxProcesses = 16;
constexpr int64_t kMaxExchanged = 8192;  // floats of a process
constexpr int64_t kHandleBytes = 64;     // of a piece of memory, as other processes open it

// Memory of a process that the others write to: for two exchanges, a float and the number of the exchange from each.
constexpr int64_t inbox_bytes(int64_t processes) { return 2 * processes * kMaxExchanged * 8; }

struct Exchange {
  int64_t processes, rank;
  uint64_t* inboxes[kMaxProcesses];  // of all processes, the own one too
  uint32_t* done;                    // exchanges so far
};

namespace cuda {
// Null, or a static sentence that says what went wrong. The memory is zero, on the present device, and stays.
const char* make_inbox(int64_t processes, void** inbox, uint8_t* handle);
const char* open_inbox(const uint8_t* handle, void** inbox);

// result: (processes, count), or if `mean` (count). Waits, on the device, for the other processes; what does not come within
// so many seconds is NaN.
const char* exchange(const Exchange& among, const float* own, int64_t count, bool mean, int64_t seconds, float* result,
                     void* stream);
}  // namespace cuda

}  // namespace rtdetr
