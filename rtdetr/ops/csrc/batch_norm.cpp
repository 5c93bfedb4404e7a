// Batch norm over rows: CUDA operators.
#include "batch_norm.h"

#include "row_tensors.h"

namespace {

rtdetr::Norm norm_of(const Tensor& x, Tensor& statistics, Tensor& weight, Tensor& bias, double eps, int64_t activation) {
  const int64_t channels = x.size(1), processes = statistics.size(0);
  return {floats("statistics", statistics, x, {processes, 2 * channels + rtdetr::kStatisticsTail}),
          processes,
          floats("weight", weight, x, {channels}),
          floats("bias", bias, x, {channels}),
          static_cast<float>(eps),
          static_cast<rtdetr::Activation>(activation)};
}

Tensor channel_statistics(Tensor x) {
  x = ready(x);
  const rtdetr::Rows rows = rows_of(x);
  Tensor partial = work_space(x),
         result = torch::stable::new_empty(x, {1, 2 * x.size(1) + rtdetr::kStatisticsTail}, ScalarType::Float);
  run("channel_statistics", x, kernels::channel_statistics, rows, writable<float>(partial), writable<float>(result));
  return result;
}

Tensor channel_norm(Tensor x, OptionalTensor plus, Tensor statistics, Tensor weight, Tensor bias, OptionalTensor running_mean,
                    OptionalTensor running_var, double momentum, double eps, int64_t activation) {
  x = ready(x);
  const rtdetr::Rows rows = rows_of(x);
  const rtdetr::Norm norm = norm_of(x, statistics, weight, bias, eps, activation);
  rtdetr::Running running{nullptr, nullptr, static_cast<float>(momentum)};
  if (running_mean && running_var) {
    running.mean = own_floats("running_mean", *running_mean, x);
    running.variance = own_floats("running_var", *running_var, x);
  }
  plus = alike("plus", plus, x);
  Tensor y = torch::stable::new_empty(x, x.sizes());
  run("channel_norm", x, kernels::channel_norm, rows, pointer(plus), norm, running, writable(y));
  return y;
}

std::tuple<Tensor, Tensor> channel_norm_sums(Tensor x, Tensor grad, OptionalTensor other, Tensor statistics, Tensor weight,
                                             Tensor bias, double eps, int64_t activation) {
  x = ready(x);
  const rtdetr::Rows rows = rows_of(x);
  const rtdetr::Norm norm = norm_of(x, statistics, weight, bias, eps, activation);
  grad = alike("grad", grad, x), other = alike("other", other, x);
  Tensor partial = work_space(x), sums = torch::stable::new_empty(x, {2, x.size(1)}, ScalarType::Float);
  Tensor g = gradient(x, other.has_value());
  run("channel_norm_sums", x, kernels::channel_norm_sums, rows, pointer(grad), pointer(other), norm, writable<float>(partial),
      writable<float>(sums), gradient_pointer(g, other.has_value()));
  return {sums, g};
}

Tensor channel_norm_backward(Tensor x, Tensor grad, Tensor sums, Tensor statistics, Tensor weight, Tensor bias, double eps,
                             int64_t activation) {
  x = ready(x);
  const rtdetr::Rows rows = rows_of(x);
  const rtdetr::Norm norm = norm_of(x, statistics, weight, bias, eps, activation);
  grad = alike("grad", grad, x);
  Tensor by_x = torch::stable::new_empty(x, x.sizes());
  run("channel_norm_backward", x, kernels::channel_norm_backward, rows, pointer(grad),
      floats("sums", sums, x, {2, x.size(1)}), norm, writable(by_x));
  return by_x;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(rtdetr, CUDA, m) {
  m.impl("channel_statistics", TORCH_BOX(&channel_statistics));
  m.impl("channel_norm", TORCH_BOX(&channel_norm));
  m.impl("channel_norm_sums", TORCH_BOX(&channel_norm_sums));
  m.impl("channel_norm_backward", TORCH_BOX(&channel_norm_backward));
}
