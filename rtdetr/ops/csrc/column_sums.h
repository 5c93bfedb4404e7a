// The border between the dispatcher (column_sums.cpp) and the kernels (cuda/column_sums.cu), as in batch_norm.h.
#pragma once

#include "rows.h"

namespace rtdetr::cuda {

// The sums over rows of g, in the first row of `sums` (2, channels): g is grad, and 0 where the ReLU gave the `result` 0,
// and is written then; `result` may be null.
const char* column_sums(const Rows& grad, const void* result, float* partial, float* sums, void* g, void* stream);

}  // namespace rtdetr::cuda
