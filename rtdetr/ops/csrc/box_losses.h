// The border between the dispatcher (box_losses.cpp) and the kernel (cuda/box_losses.cu).
#pragma once

#include <cstdint>

namespace rtdetr {

constexpr int64_t kBoxAxes = 4;  // sets, sets, images, queries

// Boxes (sizes..., 4) cxcywh, the four numbers side by side, wherever the strides say; all else is dense.
struct BoxLosses {
  const float* boxes;
  int64_t sizes[kBoxAxes], strides[kBoxAxes];
  int64_t queries;        // of all sets and images
  const float* targets;   // (images, slots, 4)
  int64_t slots;
  const int64_t* index;   // (sizes...): of the target in its image, or -1
  float *l1, *overlap, *scores;  // (sizes...)
  float *by_l1, *by_overlap;     // (sizes..., 4)
};

namespace cuda {
// Null, or a static sentence that says what went wrong.
const char* box_losses(const BoxLosses& task, void* stream);
}  // namespace cuda

}  // namespace rtdetr
