// Box losses: CUDA operator.
#include "box_losses.h"

#include "tensors.h"

namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> box_losses(Tensor boxes, Tensor targets, Tensor index) {
  STD_TORCH_CHECK(boxes.dim() == rtdetr::kBoxAxes + 1 && boxes.size(rtdetr::kBoxAxes) == 4 &&
                      boxes.stride(rtdetr::kBoxAxes) == 1 && boxes.scalar_type() == ScalarType::Float,
                  "boxes: expected float32 (K, G, B, Q, 4), the last side by side, got ", shape_of(boxes));
  const std::vector<int64_t> shape(boxes.sizes().begin(), boxes.sizes().end() - 1);
  check_type("index", index, ScalarType::Long, boxes);
  check_shape("index", index, shape);
  check_type("targets", targets, ScalarType::Float, boxes);
  check_shape("targets", targets, {boxes.size(2), targets.dim() > 1 ? targets.size(1) : 0, 4});
  index = ready(index), targets = ready(targets);
  rtdetr::BoxLosses task{};
  task.boxes = pointer<float>(boxes);
  for (int64_t axis = 0; axis < rtdetr::kBoxAxes; ++axis) task.sizes[axis] = boxes.size(axis), task.strides[axis] = boxes.stride(axis);
  task.targets = pointer<float>(targets), task.slots = targets.size(1);
  task.index = pointer<int64_t>(index);
  Tensor l1 = torch::stable::new_empty(boxes, shape), overlap = torch::stable::new_empty(boxes, shape),
         scores = torch::stable::new_empty(boxes, shape), by_l1 = torch::stable::new_empty(boxes, boxes.sizes()),
         by_overlap = torch::stable::new_empty(boxes, boxes.sizes());
  task.queries = l1.numel();
  task.l1 = writable<float>(l1), task.overlap = writable<float>(overlap), task.scores = writable<float>(scores);
  task.by_l1 = writable<float>(by_l1), task.by_overlap = writable<float>(by_overlap);
  if (task.queries > 0) run("box_losses", boxes, kernels::box_losses, task);
  return {l1, overlap, scores, by_l1, by_overlap};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(rtdetr, CUDA, m) { m.impl("box_losses", TORCH_BOX(&box_losses)); }
