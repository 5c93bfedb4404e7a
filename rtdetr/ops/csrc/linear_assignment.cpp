// Linear assignment: CPU operator or, with RTDETR_LIBRARY_CUDA, CUDA operators.
#include "linear_assignment.h"

#include "tensors.h"

namespace {

// Solves all problems of `cost`. The boxes per image are `counts` or, if that is null, `device_counts`.
std::tuple<Tensor, Tensor> solve(Tensor cost, int64_t images, const int64_t* counts, const int64_t* device_counts,
                                 int64_t repeats) {
  const ScalarType type = cost.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::Double, "cost: expected float32 or float64, got ",
                  torch::headeronly::toString(type));
  STD_TORCH_CHECK(repeats >= 1, "repeats: expected at least 1, got ", repeats);
  std::vector<int64_t> shape(cost.sizes().begin(), cost.sizes().end() - 2);
  int64_t sets = 1;
  for (const int64_t size : shape) sets *= size;
  shape.push_back(images);
  Tensor bad = torch::stable::new_empty(cost, shape, ScalarType::Bool);
  shape.push_back(cost.size(-1));
  Tensor index = torch::stable::new_empty(cost, shape, ScalarType::Long);
  if (bad.numel() == 0) return {index, bad};
  cost = torch::stable::contiguous(cost);
  const rtdetr::Assignment problems{pointer(cost), type == ScalarType::Double, sets, cost.size(-2), cost.size(-1), images,
                                    counts, device_counts, repeats, writable<int64_t>(index), writable<bool>(bad)};
  run("linear_assignment", cost, kernels::linear_assignment, problems);
  return {index, bad};
}

std::tuple<Tensor, Tensor> linear_assignment(Tensor cost, std::vector<int64_t> counts, int64_t repeats) {
  STD_TORCH_CHECK(cost.dim() >= 2, "cost: expected (..., T, Q), got ", cost.dim(), " dimensions");
  int64_t boxes = 0;
  for (const int64_t count : counts) {
    STD_TORCH_CHECK(count >= 0 && count <= cost.size(-2), "counts: expected 0 to T boxes for each image, got ", count);
    boxes += count;
  }
  STD_TORCH_CHECK(boxes == cost.size(-2), "counts: expected to add up to T = ", cost.size(-2), ", got ", boxes);
  return solve(cost, static_cast<int64_t>(counts.size()), counts.data(), nullptr, repeats);
}

#ifdef RTDETR_LIBRARY_CUDA
std::tuple<Tensor, Tensor> linear_assignment_padded(Tensor cost, Tensor counts, int64_t repeats) {
  STD_TORCH_CHECK(cost.dim() >= 2, "cost: expected (..., B * M, Q), got ", cost.dim(), " dimensions");
  STD_TORCH_CHECK(counts.dim() == 1 && counts.scalar_type() == ScalarType::Long && counts.is_cuda() &&
                      counts.get_device_index() == cost.get_device_index(),
                  "counts: expected (B,) int64 on the device of the costs");
  STD_TORCH_CHECK(counts.size(0) > 0 && cost.size(-2) % counts.size(0) == 0, "cost: expected as many rows for each of ",
                  counts.size(0), " images, got ", cost.size(-2));
  counts = torch::stable::contiguous(counts);
  return solve(cost, counts.size(0), nullptr, pointer<int64_t>(counts), repeats);
}
#endif

}  // namespace

#ifdef RTDETR_LIBRARY_CUDA
STABLE_TORCH_LIBRARY_IMPL(rtdetr, CUDA, m) {
  m.impl("linear_assignment", TORCH_BOX(&linear_assignment));
  m.impl("linear_assignment_padded", TORCH_BOX(&linear_assignment_padded));
}
#else
STABLE_TORCH_LIBRARY_IMPL(rtdetr, CPU, m) { m.impl("linear_assignment", TORCH_BOX(&linear_assignment)); }
#endif
