// A matrix of channels as the kernels over rows take it. A map with its channels last has a row for each cell.
#pragma once

#include <cstdint>

#include "ms_deform_attn.h"

namespace rtdetr {

struct Rows {
  const void* values;  // (rows, channels)
  DType type;          // f16, bf16 or f32
  int64_t rows, channels;
};

constexpr int64_t kRowAlignment = 8;    // channels are a multiple of it
constexpr int64_t kMaxRowBlocks = 528;  // that sum over rows

}  // namespace rtdetr
