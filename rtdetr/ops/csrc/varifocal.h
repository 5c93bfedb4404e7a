// The border between the dispatcher (varifocal.cpp) and the kernel (cuda/varifocal.cu).
#pragma once

#include <cstdint>

namespace rtdetr {

constexpr int64_t kVarifocalAxes = 4;  // before that of the classes

// Logits (sizes..., classes), the classes of a row side by side, rows wherever the strides say; all else is dense.
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
// Null, or a static sentence that says what went wrong.
const char* varifocal(const Varifocal& task, void* stream);
}  // namespace cuda

}  // namespace rtdetr
