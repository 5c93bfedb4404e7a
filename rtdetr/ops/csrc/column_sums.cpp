// Gradient of a bias: CUDA operator.
#include "column_sums.h"

#include "row_tensors.h"

namespace {

std::tuple<Tensor, Tensor> column_sums(Tensor grad, OptionalTensor result) {
  grad = ready(grad);
  const rtdetr::Rows rows = rows_of(grad);
  result = alike("result", result, grad);
  Tensor partial = work_space(grad), sums = torch::stable::new_empty(grad, {2, grad.size(1)}, ScalarType::Float);
  Tensor g = gradient(grad, result.has_value());
  run("column_sums", grad, kernels::column_sums, rows, pointer(result), writable<float>(partial), writable<float>(sums),
      gradient_pointer(g, result.has_value()));
  return {sums, g};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(rtdetr, CUDA, m) { m.impl("column_sums", TORCH_BOX(&column_sums)); }
