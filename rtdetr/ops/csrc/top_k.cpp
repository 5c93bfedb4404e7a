// The dispatcher side of top_k, like linear_assignment.cpp: _cpu.so declares the schema, _cuda.so brings the kernel.
#include "top_k.h"

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <tuple>

#ifdef RTDETR_LIBRARY_CUDA
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

std::tuple<Tensor, Tensor> top_k(Tensor values, int64_t k) {
  const ScalarType type = values.scalar_type();
  STD_TORCH_CHECK(values.dim() == 2, "values: expected (B, N), got ", values.dim(), " dimensions");
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::Half, "values: expected float32 or float16, got ",
                  torch::headeronly::toString(type));
  STD_TORCH_CHECK(values.size(1) <= rtdetr::kMaxTopKRow, "values: expected rows of at most ", rtdetr::kMaxTopKRow, ", got ",
                  values.size(1));
  STD_TORCH_CHECK(k >= 0 && k <= values.size(1) && k <= rtdetr::kMaxTopK, "k: expected 0 to ", rtdetr::kMaxTopK,
                  ", no more than a row has, got ", k);
  values = torch::stable::contiguous(values);
  Tensor best = torch::stable::new_empty(values, {values.size(0), k});
  Tensor index = torch::stable::new_empty(values, {values.size(0), k}, ScalarType::Long);
  if (best.numel() == 0) return {best, index};
  torch::stable::accelerator::DeviceGuard guard(values.get_device_index());
  void* stream = nullptr;
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream(values.get_device_index(), &stream) == AOTI_TORCH_SUCCESS,
                  "top_k: the current CUDA stream could not be read");
  const char* error = rtdetr::cuda::top_k({values.const_data_ptr(), type == ScalarType::Half, values.size(0), values.size(1), k,
                                           best.mutable_data_ptr(), static_cast<int64_t*>(index.mutable_data_ptr())},
                                          stream);
  STD_TORCH_CHECK(error == nullptr, "top_k: ", error);
  return {best, index};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(rtdetr, CUDA, m) { m.impl("top_k", TORCH_BOX(&top_k)); }
#else
STABLE_TORCH_LIBRARY_FRAGMENT(rtdetr, m) { m.def("top_k(Tensor values, int k) -> (Tensor best, Tensor index)"); }
#endif
