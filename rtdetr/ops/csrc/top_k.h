// Interface between the operator (top_k.cpp: tensors, checks, registration) and its kernel (cuda/top_k.cu: pointers and
// sizes only).
#pragma once

#include <cstdint>

namespace rtdetr {

struct TopK {
  const void* values;  // (rows, n)
  bool is_half;        // else float
  int64_t rows, n, k;
  void* best;      // (rows, k), same type as `values`
  int64_t* index;  // (rows, k)
};

constexpr int64_t kMaxTopKRow = 32 * 1024, kMaxTopK = 1024;

namespace cuda {
// Returns nullptr, or an error message (static storage).
const char* top_k(const TopK& problem, void* stream);
}  // namespace cuda

}  // namespace rtdetr
