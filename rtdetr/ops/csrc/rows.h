// A contiguous matrix of channels. A channels-last map has one row per cell.
#pragma once

#include <cstdint>

#include "ms_deform_attn.h"

namespace rtdetr {

struct Rows {
  const void* values;  // (rows, channels), from a multiple of 16 bytes on
  DType type;          // f16, bf16 or f32
  int64_t rows, channels;
};

constexpr int64_t kRowAlignment = 8;    // `channels` is a multiple of it
constexpr int64_t kMaxRowBlocks = 528;  // largest grid of a reduction over rows

}  // namespace rtdetr
