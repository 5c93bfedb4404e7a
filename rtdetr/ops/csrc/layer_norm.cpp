// Layer norm of a sum: CUDA operators.
#include "layer_norm.h"

#include "row_tensors.h"

namespace {

rtdetr::TokenNorm norm_of(const Tensor& x, Tensor& weight, Tensor& bias, double eps) {
  const int64_t bytes = x.size(1) * (x.scalar_type() == ScalarType::Float ? 4 : 2);
  STD_TORCH_CHECK(bytes <= rtdetr::kMaxTokenBytes, "x: expected rows of at most ", rtdetr::kMaxTokenBytes, " bytes, got ",
                  bytes);
  return {floats("weight", weight, x, {x.size(1)}), floats("bias", bias, x, {x.size(1)}), static_cast<float>(eps)};
}

std::tuple<Tensor, Tensor> token_norm(Tensor x, OptionalTensor plus, Tensor weight, Tensor bias, double eps) {
  x = ready(x);
  const rtdetr::Rows rows = rows_of(x);
  const rtdetr::TokenNorm norm = norm_of(x, weight, bias, eps);
  plus = alike("plus", plus, x);
  Tensor sum = gradient(x, plus.has_value()), y = torch::stable::new_empty(x, x.sizes());
  run("token_norm", x, kernels::token_norm, rows, pointer(plus), norm, gradient_pointer(sum, plus.has_value()), writable(y));
  return {y, sum};
}

std::tuple<Tensor, Tensor> token_norm_backward(Tensor x, Tensor grad, Tensor weight, Tensor bias, double eps) {
  x = ready(x);
  const rtdetr::Rows rows = rows_of(x);
  const rtdetr::TokenNorm norm = norm_of(x, weight, bias, eps);
  grad = alike("grad", grad, x);
  Tensor partial = work_space(x), sums = torch::stable::new_empty(x, {2, x.size(1)}, ScalarType::Float);
  Tensor by_x = torch::stable::new_empty(x, x.sizes());
  run("token_norm_backward", x, kernels::token_norm_backward, rows, pointer(grad), norm, writable<float>(partial),
      writable<float>(sums), writable(by_x));
  return {by_x, sums};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(rtdetr, CUDA, m) {
  m.impl("token_norm", TORCH_BOX(&token_norm));
  m.impl("token_norm_backward", TORCH_BOX(&token_norm_backward));
}
