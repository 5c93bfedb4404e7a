// The k largest values of each row: CUDA operator.
#include "top_k.h"

#include "tensors.h"

namespace {

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
  const rtdetr::TopK problem{pointer(values), type == ScalarType::Half, values.size(0), values.size(1), k, writable(best),
                             writable<int64_t>(index)};
  run("top_k", values, kernels::top_k, problem);
  return {best, index};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(rtdetr, CUDA, m) { m.impl("top_k", TORCH_BOX(&top_k)); }
