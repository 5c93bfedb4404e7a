// Interface between the operator (column_sums.cpp) and its kernels (cuda/column_sums.cu); see batch_norm.h.
#pragma once

#include "rows.h"

namespace rtdetr::cuda {

// Writes the sums over the rows of g to the first row of `sums` (2, channels). g is `grad` if `result` is null. Else
// `result` is the output of a ReLU, g is `grad` with zeros where it is 0, and g is written as well.
const char* column_sums(const Rows& grad, const void* result, float* partial, float* sums, void* g, void* stream);

}  // namespace rtdetr::cuda
