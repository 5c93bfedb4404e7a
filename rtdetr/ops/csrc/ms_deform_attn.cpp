// Deformable attention: CPU operators or, with RTDETR_LIBRARY_CUDA, CUDA operators.
#include "tensors.h"

namespace {

using Sizes = rtdetr::Sizes;

Sizes sizes_of(const Tensor& value, const Tensor& locations, const char* name) {
  STD_TORCH_CHECK(value.dim() == 4, "value: expected 4 dimensions (B, S, H, D), got ", shape_of(value));
  STD_TORCH_CHECK(locations.dim() == 6, name, ": expected 6 dimensions (B, Q, H, L, P, 2), got ", shape_of(locations));
  Sizes n{kernel_type(value), value.size(0), value.size(1), value.size(2), value.size(3),
          locations.size(1),  locations.size(3), locations.size(4)};
  check_shape(name, locations, {n.B, n.Q, n.H, n.L, n.P, 2});
  return n;
}

Tensor forward(Tensor value, std::vector<int64_t> hw, OptionalTensor shapes, OptionalTensor starts, Tensor locations,
               Tensor weights) {
  const Sizes n = sizes_of(value, locations, "sampling_locations");
  check_shape("attention_weights", weights, {n.B, n.Q, n.H, n.L, n.P});
  check_type("sampling_locations", locations, compute_type(value), value);
  check_type("attention_weights", weights, compute_type(value), value);
  LevelTable table(n.L, n.S, std::move(hw), shapes, starts);
  value = ready(value);
  locations = ready(locations);
  weights = ready(weights);
  Tensor output = torch::stable::new_empty(value, {n.B, n.Q, n.H * n.D});
  if (output.numel() == 0) return output;
  run("ms_deform_attn", value, kernels::forward, n, table.levels(), pointer(value), pointer(locations), pointer(weights),
      writable(output));
  return output;
}

std::tuple<Tensor, Tensor, Tensor> backward(Tensor grad_output, Tensor value, std::vector<int64_t> hw, OptionalTensor shapes,
                                            OptionalTensor starts, Tensor locations, Tensor weights, bool need_value,
                                            bool need_locations, bool need_weights, bool deterministic) {
  const Sizes n = sizes_of(value, locations, "sampling_locations");
  check_shape("attention_weights", weights, {n.B, n.Q, n.H, n.L, n.P});
  check_shape("grad_output", grad_output, {n.B, n.Q, n.H * n.D});
  check_type("grad_output", grad_output, value.scalar_type(), value);
  check_type("sampling_locations", locations, compute_type(value), value);
  check_type("attention_weights", weights, compute_type(value), value);
  LevelTable table(n.L, n.S, std::move(hw), shapes, starts);
  grad_output = ready(grad_output);
  value = ready(value);
  locations = ready(locations);
  weights = ready(weights);
  Tensor grad_value = gradient(value, need_value);
  Tensor grad_locations = gradient(locations, need_locations);
  Tensor grad_weights = gradient(weights, need_weights);
  void* const outputs[] = {gradient_pointer(grad_value, need_value), gradient_pointer(grad_locations, need_locations),
                           gradient_pointer(grad_weights, need_weights)};
#ifdef RTDETR_LIBRARY_CUDA
  torch::stable::accelerator::DeviceGuard guard(value.get_device_index());
  const int64_t bytes = kernels::backward_scratch_bytes(n, table.levels(), deterministic);
  OptionalTensor scratch;
  if (bytes > 0) scratch = torch::stable::new_empty(value, {bytes}, ScalarType::Byte);
  run("ms_deform_attn", value, kernels::backward, n, table.levels(), pointer(grad_output), pointer(value), pointer(locations),
      pointer(weights), outputs[0], outputs[1], outputs[2], scratch ? writable(*scratch) : nullptr, deterministic);
#else
  (void)deterministic;  // the CPU kernel is always deterministic
  run("ms_deform_attn", value, kernels::backward, n, table.levels(), pointer(grad_output), pointer(value), pointer(locations),
      pointer(weights), outputs[0], outputs[1], outputs[2]);
#endif
  return {grad_value, grad_locations, grad_weights};
}

#ifdef RTDETR_LIBRARY_CUDA
// Checked, contiguous arguments of the fused call. Owns the tensors that `fused` points to.
struct FusedCall {
  FusedCall(Tensor value_, std::vector<int64_t> hw, const OptionalTensor& shapes, const OptionalTensor& starts,
            const Tensor& reference_, const Tensor& offsets_, const Tensor& logits_, double offset_scale)
      : n(sizes_of(value_, offsets_, "offsets")), table(n.L, n.S, std::move(hw), shapes, starts) {
    check_shape("logits", logits_, {n.B, n.Q, n.H, n.L, n.P});
    check_type("offsets", offsets_, value_.scalar_type(), value_);
    check_type("logits", logits_, value_.scalar_type(), value_);
    check_type("reference", reference_, compute_type(value_), value_);
    STD_TORCH_CHECK(reference_.dim() == 4 && (reference_.size(2) == 1 || reference_.size(2) == n.L) &&
                        (reference_.size(3) == 2 || reference_.size(3) == 4),
                    "reference: expected (B, Q, 1 or L, 2 or 4), got ", shape_of(reference_));
    check_shape("reference", reference_, {n.B, n.Q, reference_.size(2), reference_.size(3)});
    value = ready(value_);
    reference = ready(reference_);
    offsets = ready(offsets_);
    logits = ready(logits_);
    fused = {pointer(reference), reference.size(2), reference.size(3), offset_scale, pointer(offsets), pointer(logits)};
  }

  const Sizes n;
  LevelTable table;
  Tensor value, reference, offsets, logits;
  kernels::Fused fused;
};

Tensor fused_forward(Tensor value, std::vector<int64_t> hw, OptionalTensor shapes, OptionalTensor starts, Tensor reference,
                     Tensor offsets, Tensor logits, double offset_scale) {
  FusedCall call(value, std::move(hw), shapes, starts, reference, offsets, logits, offset_scale);
  Tensor output = torch::stable::new_empty(call.value, {call.n.B, call.n.Q, call.n.H * call.n.D});
  if (output.numel() == 0) return output;
  run("ms_deform_attn", value, kernels::fused_forward, call.n, call.table.levels(), pointer(call.value), call.fused,
      writable(output));
  return output;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> fused_backward(Tensor grad_output, Tensor value, std::vector<int64_t> hw,
                                                          OptionalTensor shapes, OptionalTensor starts, Tensor reference,
                                                          Tensor offsets, Tensor logits, double offset_scale,
                                                          bool need_value, bool need_reference, bool need_offsets,
                                                          bool need_logits, bool deterministic) {
  FusedCall call(value, std::move(hw), shapes, starts, reference, offsets, logits, offset_scale);
  const Sizes& n = call.n;
  check_shape("grad_output", grad_output, {n.B, n.Q, n.H * n.D});
  check_type("grad_output", grad_output, value.scalar_type(), value);
  grad_output = ready(grad_output);
  Tensor grad_value = gradient(call.value, need_value), grad_reference = gradient(call.reference, need_reference);
  Tensor grad_offsets = gradient(call.offsets, need_offsets), grad_logits = gradient(call.logits, need_logits);
  torch::stable::accelerator::DeviceGuard guard(value.get_device_index());
  const int64_t bytes = kernels::fused_backward_scratch_bytes(n, call.table.levels(), deterministic);
  Tensor scratch = torch::stable::new_empty(value, {bytes}, ScalarType::Byte);
  run("ms_deform_attn", value, kernels::fused_backward, n, call.table.levels(), pointer(grad_output), pointer(call.value),
      call.fused, gradient_pointer(grad_value, need_value), gradient_pointer(grad_reference, need_reference),
      gradient_pointer(grad_offsets, need_offsets), gradient_pointer(grad_logits, need_logits), writable(scratch),
      deterministic);
  return {grad_value, grad_reference, grad_offsets, grad_logits};
}
#endif

}  // namespace

#ifdef RTDETR_LIBRARY_CUDA
STABLE_TORCH_LIBRARY_IMPL(rtdetr, CUDA, m) {
  m.impl("ms_deform_attn", TORCH_BOX(&forward));
  m.impl("ms_deform_attn_backward", TORCH_BOX(&backward));
  m.impl("ms_deform_attn_fused", TORCH_BOX(&fused_forward));
  m.impl("ms_deform_attn_fused_backward", TORCH_BOX(&fused_backward));
}
#else
STABLE_TORCH_LIBRARY_IMPL(rtdetr, CPU, m) {
  m.impl("ms_deform_attn", TORCH_BOX(&forward));
  m.impl("ms_deform_attn_backward", TORCH_BOX(&backward));
}
#endif
