// The border between the dispatcher (matching_cost.cpp) and the kernel (cuda/matching_cost.cu).
#pragma once

#include <cstdint>

#include "ms_deform_attn.h"

namespace rtdetr {

constexpr int64_t kMaxCostImages = 512;  // whose counts travel as arguments of the launch
constexpr int64_t kMaxCostSets = 65535;    // layers times groups

// Boxes, targets and costs are double beside double logits, else float. Logits and boxes lie wherever their strides say.
struct MatchingCost {
  const void* logits;  // (layers, groups, images, queries, classes)
  const void* boxes;   // (layers, groups, images, queries, 4) cxcywh
  int64_t logit_strides[5], box_strides[5];
  DType type;  // of the logits
  int64_t layers, groups, images, queries, classes;
  const int64_t* labels;  // (images, slots)
  const void* targets;    // (images, slots, 4) cxcywh
  int64_t slots;
  const int64_t* counts;  // (images,) on the host: rows of each image; null: `slots` for each
  int64_t rows;           // of all images
  double class_weight, l1_weight, giou_weight;
  void* cost;  // (layers, groups, rows, queries)
};

namespace cuda {
// Null, or a static sentence that says what went wrong.
const char* matching_cost(const MatchingCost& task, void* stream);
}  // namespace cuda

}  // namespace rtdetr
