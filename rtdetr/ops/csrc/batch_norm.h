// The border between the dispatcher (batch_norm.cpp: tensors, checks, registration) and the kernels (cuda/batch_norm.cu:
// pointers and sizes only). A map with its channels last is a matrix here: a row for each cell of each image.
#pragma once

#include <cstdint>

#include "rows.h"

namespace rtdetr {

enum class Activation : int64_t { none = 0, relu = 1, silu = 2 };

// Mean, biased variance and number of rows, (2 * channels + kStatisticsTail) floats of each process, of which the last are
// not used; and what is learnt.
constexpr int64_t kStatisticsTail = 4;  // four floats are loaded at once

struct Norm {
  const float* statistics;
  int64_t processes;
  const float* weight;
  const float* bias;
  float eps;
  Activation activation;
};

struct Running {
  float* mean;  // null: nothing is kept
  float* variance;
  float momentum;
};

namespace cuda {
// Null, or a static sentence that says what went wrong. `partial` are kMaxRowBlocks * 2 * channels floats to work in.
const char* channel_statistics(const Rows& x, float* partial, float* statistics, void* stream);

// activation(norm(x) + plus), where plus may be null.
const char* channel_norm(const Rows& x, const void* plus, const Norm& norm, const Running& running, void* y, void* stream);

// `sums`: of the gradient g before the activation, and of g times the normalised x, (2, channels). `other`, which may be
// null: for SiLU what was added, for ReLU the result y; then g is written, the gradient of what was added.
const char* channel_norm_sums(const Rows& x, const void* grad, const void* other, const Norm& norm, float* partial, float* sums,
                              void* g, void* stream);

// sums: those of channel_norm_sums, of several processes their mean.
const char* channel_norm_backward(const Rows& x, const void* grad, const float* sums, const Norm& norm, void* by_x,
                                  void* stream);
}  // namespace cuda

}  // namespace rtdetr
