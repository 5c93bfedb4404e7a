// The border between the dispatcher (max_pool.cpp) and the kernels (cuda/max_pool.cu): the pooling after the stem, of 3 x 3
// cells in steps of 2 with a border of 1, over maps with channels last.
#pragma once

#include "rows.h"

namespace rtdetr {

struct Pool {
  DType type;
  int64_t images, height, width, channels;  // of what is pooled
  int64_t out_height, out_width;
};

namespace cuda {
// y, and where each value lay in its window: 0 to 8, row by row, in a byte.
const char* max_pool(const Pool& pool, const void* x, void* y, uint8_t* place, void* stream);
const char* max_pool_backward(const Pool& pool, const void* grad, const uint8_t* place, void* by_x, void* stream);
}  // namespace cuda

}  // namespace rtdetr
