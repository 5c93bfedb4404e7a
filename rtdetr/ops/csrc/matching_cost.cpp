// Matching costs: CUDA operator.
#include "matching_cost.h"

#include "tensors.h"

namespace {

Tensor matching_cost(Tensor logits, Tensor boxes, Tensor labels, Tensor targets, std::vector<int64_t> counts,
                     double class_weight, double l1_weight, double giou_weight) {
  STD_TORCH_CHECK(logits.dim() == 5, "logits: expected (K, G, B, Q, C), got ", shape_of(logits));
  STD_TORCH_CHECK(labels.dim() == 2, "labels: expected (B, M), got ", shape_of(labels));
  rtdetr::MatchingCost task{};
  task.type = kernel_type(logits);
  task.layers = logits.size(0), task.groups = logits.size(1), task.images = logits.size(2);
  task.queries = logits.size(3), task.classes = logits.size(4), task.slots = labels.size(1);
  check_type("boxes", boxes, compute_type(logits), logits);
  check_shape("boxes", boxes, {task.layers, task.groups, task.images, task.queries, 4});
  check_type("labels", labels, ScalarType::Long, logits);
  check_shape("labels", labels, {task.images, task.slots});
  check_type("targets", targets, compute_type(logits), logits);
  check_shape("targets", targets, {task.images, task.slots, 4});
  STD_TORCH_CHECK(labels.is_contiguous() && targets.is_contiguous(), "labels and targets: expected to be contiguous");
  STD_TORCH_CHECK(task.layers * task.groups <= rtdetr::kMaxCostSets, "logits: expected at most ", rtdetr::kMaxCostSets,
                  " layers and groups, got ", shape_of(logits));
  task.rows = task.images * task.slots;
  if (!counts.empty()) {
    STD_TORCH_CHECK(static_cast<int64_t>(counts.size()) == task.images && task.images <= rtdetr::kMaxCostImages,
                    "counts: expected one for each of ", task.images, " images, at most ", rtdetr::kMaxCostImages,
                    ", got ", counts.size());
    task.counts = counts.data(), task.rows = 0;
    for (const int64_t count : counts) {
      STD_TORCH_CHECK(0 <= count && count <= task.slots, "counts: expected 0 to ", task.slots, ", got ", count);
      task.rows += count;
    }
  }
  for (int64_t axis = 0; axis < 5; ++axis)
    task.logit_strides[axis] = logits.stride(axis), task.box_strides[axis] = boxes.stride(axis);
  task.logits = pointer(logits), task.boxes = pointer(boxes), task.targets = pointer(targets);
  task.labels = pointer<int64_t>(labels);
  task.class_weight = class_weight, task.l1_weight = l1_weight, task.giou_weight = giou_weight;
  Tensor cost = torch::stable::new_empty(boxes, {task.layers, task.groups, task.rows, task.queries});
  if (cost.numel() == 0) return cost;
  task.cost = writable(cost);
  run("matching_cost", logits, kernels::matching_cost, task);
  return cost;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(rtdetr, CUDA, m) { m.impl("matching_cost", TORCH_BOX(&matching_cost)); }
