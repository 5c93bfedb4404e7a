// Deformable aggregation: CUDA operators. On a CPU, rtdetr/ops/deformable_aggregation.py calls the attention operator.
#include "deformable_aggregation.h"

#include "tensors.h"

namespace {

using Sizes = rtdetr::AggregationSizes;

// Checked, contiguous arguments. Owns the tensors that the kernels read.
struct Call {
  Call(const Tensor& features_, std::vector<int64_t> hw, const OptionalTensor& shapes, const OptionalTensor& starts,
       const Tensor& locations_, const Tensor& weights_)
      : n(sizes_of(features_, locations_, weights_)), table(n.N * n.L, n.S, std::move(hw), shapes, starts) {
    check_type("sampling_locations", locations_, compute_type(features_), features_);
    check_type("weights", weights_, compute_type(features_), features_);
    features = ready(features_);
    locations = ready(locations_);
    weights = ready(weights_);
  }

  static Sizes sizes_of(const Tensor& features, const Tensor& locations, const Tensor& weights) {
    STD_TORCH_CHECK(features.dim() == 3, "features: expected 3 dimensions (B, S, C), got ", shape_of(features));
    STD_TORCH_CHECK(weights.dim() == 6, "weights: expected 6 dimensions (B, A, P, N, L, G), got ", shape_of(weights));
    const Sizes n{kernel_type(features), features.size(0), features.size(1), features.size(2), weights.size(1),
                  weights.size(2),       weights.size(3),  weights.size(4),  weights.size(5)};
    check_shape("weights", weights, {n.B, n.A, n.P, n.N, n.L, n.G});
    check_shape("sampling_locations", locations, {n.B, n.A, n.P, n.N, 2});
    STD_TORCH_CHECK(n.G > 0 && n.C % n.G == 0, "features: expected channels in ", n.G, " equal groups, got ", n.C);
    return n;
  }

  const Sizes n;
  LevelTable table;
  Tensor features, locations, weights;
};

Tensor forward(Tensor features, std::vector<int64_t> hw, OptionalTensor shapes, OptionalTensor starts, Tensor locations,
               Tensor weights) {
  Call call(features, std::move(hw), shapes, starts, locations, weights);
  Tensor output = torch::stable::new_empty(call.features, {call.n.B, call.n.A, call.n.C});
  run("deformable_aggregation", features, kernels::aggregate, call.n, call.table.levels(), pointer(call.features),
      pointer(call.locations), pointer(call.weights), writable(output));
  return output;
}

std::tuple<Tensor, Tensor, Tensor> backward(Tensor grad_output, Tensor features, std::vector<int64_t> hw,
                                            OptionalTensor shapes, OptionalTensor starts, Tensor locations, Tensor weights,
                                            bool need_features, bool need_locations, bool need_weights) {
  Call call(features, std::move(hw), shapes, starts, locations, weights);
  const Sizes& n = call.n;
  check_shape("grad_output", grad_output, {n.B, n.A, n.C});
  check_type("grad_output", grad_output, features.scalar_type(), features);
  grad_output = ready(grad_output);
  Tensor grad_features = gradient(call.features, need_features);
  Tensor grad_locations = gradient(call.locations, need_locations), grad_weights = gradient(call.weights, need_weights);
  const int64_t bytes = need_features ? kernels::aggregate_backward_scratch_bytes(n) : 0;
  OptionalTensor scratch;
  if (bytes > 0) scratch = torch::stable::new_empty(features, {bytes}, ScalarType::Byte);
  run("deformable_aggregation", features, kernels::aggregate_backward, n, call.table.levels(), pointer(grad_output),
      pointer(call.features), pointer(call.locations), pointer(call.weights),
      gradient_pointer(grad_features, need_features), gradient_pointer(grad_locations, need_locations),
      gradient_pointer(grad_weights, need_weights), scratch ? writable(*scratch) : nullptr);
  return {grad_features, grad_locations, grad_weights};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(rtdetr, CUDA, m) {
  m.impl("deformable_aggregation", TORCH_BOX(&forward));
  m.impl("deformable_aggregation_backward", TORCH_BOX(&backward));
}
