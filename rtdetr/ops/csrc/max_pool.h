// Interface between the operators (max_pool.cpp) and their kernels (cuda/max_pool.cu): the max pooling after the stem, with
// 3 x 3 windows, stride 2 and padding 1, of channels-last maps.
#pragma once

#include "rows.h"

namespace rtdetr {

struct Pool {
  DType type;
  int64_t images, height, width, channels;  // of the input
  int64_t out_height, out_width;
};

namespace cuda {
// Writes y, and the position of each maximum in its window: 0 to 8, row-major, one byte each.
const char* max_pool(const Pool& pool, const void* x, void* y, uint8_t* place, void* stream);
const char* max_pool_backward(const Pool& pool, const void* grad, const uint8_t* place, void* by_x, void* stream);
}  // namespace cuda

}  // namespace rtdetr
