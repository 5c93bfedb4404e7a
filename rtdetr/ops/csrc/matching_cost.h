// Interface between the operator (matching_cost.cpp) and its kernel (cuda/matching_cost.cu).
#pragma once

#include <cstdint>

#include "ms_deform_attn.h"

namespace rtdetr {

constexpr int64_t kMaxCostImages = 512;  // if `counts` is given: it becomes a kernel argument
constexpr int64_t kMaxCostSets = 65535;    // layers * groups

// Boxes, targets and costs are double if the logits are, else float. Logits and boxes may have any strides.
struct MatchingCost {
  const void* logits;  // (layers, groups, images, queries, classes)
  const void* boxes;   // (layers, groups, images, queries, 4) cxcywh
  int64_t logit_strides[5], box_strides[5];
  DType type;  // of the logits
  int64_t layers, groups, images, queries, classes;
  const int64_t* labels;  // (images, slots)
  const void* targets;    // (images, slots, 4) cxcywh
  int64_t slots;
  const int64_t* counts;  // (images,) rows per image, on the host; null: `slots` rows each
  int64_t rows;           // total
  double class_weight, l1_weight, giou_weight;
  void* cost;  // (layers, groups, rows, queries)
};

namespace cuda {
// Returns nullptr, or an error message (static storage).
const char* matching_cost(const MatchingCost& task, void* stream);
}  // namespace cuda

}  // namespace rtdetr
