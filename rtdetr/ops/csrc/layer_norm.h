// The border between the dispatcher (layer_norm.cpp) and the kernels (cuda/layer_norm.cu), as in batch_norm.h.
#pragma once

#include "rows.h"

namespace rtdetr {

constexpr int64_t kMaxTokenBytes = 2048;  // of a row

struct TokenNorm {
  const float* weight;
  const float* bias;
  float eps;
};

namespace cuda {
// y = norm(x + plus) and, where plus is not null, sum = x + plus.
const char* token_norm(const Rows& x, const void* plus, const TokenNorm& norm, void* sum, void* y, void* stream);

// by_x, and of the weight and the bias sums (2, channels): first that of grad, then of grad times the normalised x.
const char* token_norm_backward(const Rows& x, const void* grad, const TokenNorm& norm, float* partial, float* sums, void* by_x,
                                void* stream);
}  // namespace cuda

}  // namespace rtdetr
