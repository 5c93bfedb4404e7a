// The schemas of all operators, defined in _cpu.so; _cuda.so registers the CUDA implementations. Both libraries use only the
// LibTorch Stable ABI, so that one binary runs with every torch from 2.10 on and every Python.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(rtdetr, m) {
  // hw: 2 * L integers (height, width) if known on the host (symbolic under torch.compile); else empty, and the two tensors
  // are given.
  m.def(
      "ms_deform_attn(Tensor value, SymInt[] hw, Tensor? spatial_shapes, Tensor? level_start_index, "
      "Tensor sampling_locations, Tensor attention_weights) -> Tensor");
  m.def(
      "ms_deform_attn_backward(Tensor grad_output, Tensor value, SymInt[] hw, Tensor? spatial_shapes, "
      "Tensor? level_start_index, Tensor sampling_locations, Tensor attention_weights, bool need_value, "
      "bool need_locations, bool need_weights, bool deterministic) -> (Tensor, Tensor, Tensor)");
  m.def(
      "ms_deform_attn_fused(Tensor value, SymInt[] hw, Tensor? spatial_shapes, Tensor? level_start_index, "
      "Tensor reference, Tensor offsets, Tensor logits, float offset_scale) -> Tensor");
  m.def(
      "ms_deform_attn_fused_backward(Tensor grad_output, Tensor value, SymInt[] hw, Tensor? spatial_shapes, "
      "Tensor? level_start_index, Tensor reference, Tensor offsets, Tensor logits, float offset_scale, bool need_value, "
      "bool need_reference, bool need_offsets, bool need_logits, bool deterministic) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "deformable_aggregation(Tensor features, SymInt[] hw, Tensor? spatial_shapes, Tensor? level_start_index, "
      "Tensor sampling_locations, Tensor weights) -> Tensor");
  m.def(
      "deformable_aggregation_backward(Tensor grad_output, Tensor features, SymInt[] hw, Tensor? spatial_shapes, "
      "Tensor? level_start_index, Tensor sampling_locations, Tensor weights, bool need_features, bool need_locations, "
      "bool need_weights) -> (Tensor, Tensor, Tensor)");
  m.def("linear_assignment(Tensor cost, int[] counts, int repeats) -> (Tensor index, Tensor bad)");
  m.def("linear_assignment_padded(Tensor cost, Tensor counts, int repeats) -> (Tensor index, Tensor bad)");
  m.def(
      "matching_cost(Tensor logits, Tensor boxes, Tensor labels, Tensor targets, int[] counts, float class_weight, "
      "float l1_weight, float giou_weight) -> Tensor");
  m.def(
      "varifocal(Tensor logits, Tensor labels, Tensor scores, Tensor matched, bool bounded, float alpha) -> "
      "(Tensor losses, Tensor gradient)");
  m.def(
      "box_losses(Tensor boxes, Tensor targets, Tensor index) -> "
      "(Tensor l1, Tensor overlap, Tensor scores, Tensor by_l1, Tensor by_overlap)");
  m.def("channel_statistics(Tensor x) -> Tensor");
  m.def(
      "channel_norm(Tensor x, Tensor? plus, Tensor statistics, Tensor weight, Tensor bias, Tensor(a!)? running_mean, "
      "Tensor(b!)? running_var, float momentum, float eps, int activation) -> Tensor");
  m.def(
      "channel_norm_sums(Tensor x, Tensor grad, Tensor? other, Tensor statistics, Tensor weight, Tensor bias, float eps, "
      "int activation) -> (Tensor sums, Tensor g)");
  m.def(
      "channel_norm_backward(Tensor x, Tensor grad, Tensor sums, Tensor statistics, Tensor weight, Tensor bias, float eps, "
      "int activation) -> Tensor");
  m.def("token_norm(Tensor x, Tensor? plus, Tensor weight, Tensor bias, float eps) -> (Tensor y, Tensor sum)");
  m.def("token_norm_backward(Tensor x, Tensor grad, Tensor weight, Tensor bias, float eps) -> (Tensor by_x, Tensor sums)");
  m.def("column_sums(Tensor grad, Tensor? result) -> (Tensor sums, Tensor g)");
  m.def("max_pool(Tensor x) -> (Tensor y, Tensor place)");
  m.def("max_pool_backward(Tensor grad, Tensor place, int height, int width) -> Tensor");
  m.def("top_k(Tensor values, int k) -> (Tensor best, Tensor index)");
}
