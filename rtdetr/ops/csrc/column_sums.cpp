// The dispatcher side of the gradient of a bias, like top_k.cpp.
#include "column_sums.h"

#include "row_tensors.h"

#ifdef RTDETR_LIBRARY_CUDA
namespace {

std::tuple<Tensor, Tensor> column_sums(Tensor grad, OptionalTensor result) {
  const rtdetr::Rows rows = rows_of(grad);
  Tensor partial = work_space(grad), sums = torch::stable::new_empty(grad, {2, grad.size(1)}, ScalarType::Float);
  Tensor g = gradient(grad, result.has_value());
  torch::stable::accelerator::DeviceGuard guard(grad.get_device_index());
  const char* error = rtdetr::cuda::column_sums(rows, result ? alike("result", *result, grad) : nullptr, writable(partial),
                                                writable(sums), gradient_pointer(g, result.has_value()), current_stream(grad));
  STD_TORCH_CHECK(error == nullptr, "column_sums: ", error);
  return {sums, g};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(rtdetr, CUDA, m) { m.impl("column_sums", TORCH_BOX(&column_sums)); }
#else
STABLE_TORCH_LIBRARY_FRAGMENT(rtdetr, m) { m.def("column_sums(Tensor grad, Tensor? result) -> (Tensor sums, Tensor g)"); }
#endif
