// The border between the dispatcher (top_k.cpp: tensors, checks, registration) and the kernel (cuda/top_k.cu: pointers and
// sizes only).
#pragma once

#include <cstdint>

namespace rtdetr {

struct TopK {
  const void* values;  // (rows, n)
  bool is_half;        // else float
  int64_t rows, n, k;
  void* best;      // (rows, k) of the type of the values
  int64_t* index;  // (rows, k)
};

constexpr int64_t kMaxTopKRow = 32 * 1024, kMaxTopK = 1024;

namespace cuda {
// Null, or a static sentence that says what went wrong.
const char* top_k(const TopK& problem, void* stream);
}  // namespace cuda

}  // namespace rtdetr
