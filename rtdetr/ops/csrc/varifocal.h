// Interface between the operator (varifocal.cpp) and its kernel (cuda/varifocal.cu).
#pragma once

#include <cstdint>

namespace rtdetr {

constexpr int64_t kVarifocalAxes = 4;  // before the class axis

// logits (sizes..., classes): the class axis is contiguous, the others have any strides. All other tensors are contiguous.
struct Varifocal {
  const float* logits;
  int64_t sizes[kVarifocalAxes], strides[kVarifocalAxes];
  int64_t rows, classes;
  const int64_t* labels;
  const float* scores;
  const bool* matched;
  bool bounded;
  float alpha;
  float* losses;    // (rows)
  float* gradient;  // (rows, classes)
};

namespace cuda {
// Returns nullptr, or an error message (static storage).
const char* varifocal(const Varifocal& task, void* stream);
}  // namespace cuda

}  // namespace rtdetr
