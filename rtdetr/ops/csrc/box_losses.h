// Interface between the operator (box_losses.cpp) and its kernel (cuda/box_losses.cu).
#pragma once

#include <cstdint>

namespace rtdetr {

constexpr int64_t kBoxAxes = 4;  // layers, groups, images, queries

// boxes (sizes..., 4) cxcywh: the last axis is contiguous, the others have any strides. All other tensors are contiguous.
struct BoxLosses {
  const float* boxes;
  int64_t sizes[kBoxAxes], strides[kBoxAxes];
  int64_t queries;        // product of `sizes`
  const float* targets;   // (images, slots, 4)
  int64_t slots;
  const int64_t* index;   // (sizes...), target within its image, or -1
  float *l1, *overlap, *scores;  // (sizes...)
  float *by_l1, *by_overlap;     // (sizes..., 4)
};

namespace cuda {
// Returns nullptr, or an error message (static storage).
const char* box_losses(const BoxLosses& task, void* stream);
}  // namespace cuda

}  // namespace rtdetr
