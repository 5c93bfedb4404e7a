// Interface between the operators (layer_norm.cpp) and their kernels (cuda/layer_norm.cu); see batch_norm.h.
#pragma once

#include "rows.h"

namespace rtdetr {

constexpr int64_t kMaxTokenBytes = 2048;  // per row

struct TokenNorm {
  const float* weight;
  const float* bias;
  float eps;
};

namespace cuda {
// y = norm(x + plus). Also writes sum = x + plus, unless plus is null.
const char* token_norm(const Rows& x, const void* plus, const TokenNorm& norm, void* sum, void* y, void* stream);

// Gradients: by_x; sums (2, channels): of grad (bias), then of grad times the normalised x (weight).
const char* token_norm_backward(const Rows& x, const void* grad, const TokenNorm& norm, float* partial, float* sums, void* by_x,
                                void* stream);
}  // namespace cuda

}  // namespace rtdetr
