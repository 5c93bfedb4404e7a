// Varifocal loss: CUDA operator.
#include "varifocal.h"

#include "tensors.h"

namespace {

std::tuple<Tensor, Tensor> varifocal(Tensor logits, Tensor labels, Tensor scores, Tensor matched, bool bounded, double alpha) {
  const int64_t axes = logits.dim() - 1;
  STD_TORCH_CHECK(logits.scalar_type() == ScalarType::Float && 0 < axes && axes <= rtdetr::kVarifocalAxes &&
                      logits.stride(axes) == 1,
                  "logits: expected float32 (..., C), classes side by side, of 2 to ", rtdetr::kVarifocalAxes + 1,
                  " axes, got ", shape_of(logits));
  const std::vector<int64_t> shape(logits.sizes().begin(), logits.sizes().end() - 1);
  const auto rows_like = [&](const char* name, const Tensor& tensor, ScalarType type) {
    check_type(name, tensor, type, logits);
    check_shape(name, tensor, shape);
    STD_TORCH_CHECK(tensor.is_contiguous(), name, ": expected to be contiguous");
    return pointer(tensor);
  };
  Tensor losses = torch::stable::new_empty(logits, shape);
  Tensor gradient = torch::stable::new_empty(logits, logits.sizes());
  rtdetr::Varifocal task{};
  task.logits = pointer<float>(logits);
  task.rows = losses.numel(), task.classes = logits.size(axes);
  for (int64_t axis = 0, first = rtdetr::kVarifocalAxes - axes; axis < rtdetr::kVarifocalAxes; ++axis) {
    task.sizes[axis] = axis < first ? 1 : logits.size(axis - first);
    task.strides[axis] = axis < first ? 0 : logits.stride(axis - first);
  }
  task.labels = static_cast<const int64_t*>(rows_like("labels", labels, ScalarType::Long));
  task.scores = static_cast<const float*>(rows_like("scores", scores, ScalarType::Float));
  task.matched = static_cast<const bool*>(rows_like("matched", matched, ScalarType::Bool));
  task.bounded = bounded, task.alpha = static_cast<float>(alpha);
  task.losses = writable<float>(losses);
  task.gradient = writable<float>(gradient);
  if (gradient.numel() == 0) return {torch::stable::zero_(losses), gradient};
  run("varifocal", logits, kernels::varifocal, task);
  return {losses, gradient};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(rtdetr, CUDA, m) { m.impl("varifocal", TORCH_BOX(&varifocal)); }
