// Interface between the operators (batch_norm.cpp: tensors, checks, registration) and their kernels (cuda/batch_norm.cu:
// pointers and sizes only). A channels-last map is a matrix here, with one row per cell of each image.
#pragma once

#include <cstdint>

#include "rows.h"

namespace rtdetr {

enum class Activation : int64_t { none = 0, relu = 1, silu = 2 };

// Statistics (processes, 2 * channels + kStatisticsTail): mean, biased variance, number of rows, padding.
constexpr int64_t kStatisticsTail = 4;  // keeps each process aligned to 16 bytes, for loads of four floats

struct Norm {
  const float* statistics;
  int64_t processes;
  const float* weight;
  const float* bias;
  float eps;
  Activation activation;
};

struct Running {
  float* mean;  // null: no running statistics
  float* variance;
  float momentum;
};

namespace cuda {
// All return nullptr, or an error message (static storage). `partial`: scratch, kMaxRowBlocks * 2 * channels floats.
const char* channel_statistics(const Rows& x, float* partial, float* statistics, void* stream);

// y = activation(norm(x) + plus); plus may be null.
const char* channel_norm(const Rows& x, const void* plus, const Norm& norm, const Running& running, void* y, void* stream);

// sums (2, channels): of g, the gradient before the activation, and of g times the normalised x. `other`: null, or, if the
// forward pass added `plus`, y for ReLU and `plus` for SiLU. g is then written: it is the gradient of `plus`.
const char* channel_norm_sums(const Rows& x, const void* grad, const void* other, const Norm& norm, float* partial, float* sums,
                              void* g, void* stream);

// sums: from channel_norm_sums, averaged over the processes.
const char* channel_norm_backward(const Rows& x, const void* grad, const float* sums, const Norm& norm, void* by_x,
                                  void* stream);
}  // namespace cuda

}  // namespace rtdetr
