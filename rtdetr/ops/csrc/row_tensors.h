// Helpers for the operators over rows of channels: tensor checks and pointers.
#pragma once

#include "rows.h"
#include "tensors.h"

namespace {

// Rows of a tensor that is `ready`.
inline rtdetr::Rows rows_of(const Tensor& x) {
  STD_TORCH_CHECK(x.dim() == 2 && x.size(0) > 0 && x.size(1) % rtdetr::kRowAlignment == 0,
                  "x: expected rows (N, C), C a multiple of ", rtdetr::kRowAlignment, ", got ", shape_of(x));
  STD_TORCH_CHECK(x.scalar_type() != ScalarType::Double, "x: expected float32 or a type of 16 bits, got float64");
  return {pointer(x), kernel_type(x), x.size(0), x.size(1)};
}

// The address of `tensor`, which is replaced by one that is `ready`.
inline const float* floats(const char* name, Tensor& tensor, const Tensor& x, const std::vector<int64_t>& shape) {
  check_type(name, tensor, ScalarType::Float, x);
  check_shape(name, tensor, shape);
  tensor = ready(tensor);
  return pointer<float>(tensor);
}

// The address of `tensor`, which a kernel changes.
inline float* own_floats(const char* name, const Tensor& tensor, const Tensor& x) {
  check_type(name, tensor, ScalarType::Float, x);
  check_shape(name, tensor, {x.size(1)});
  STD_TORCH_CHECK(tensor.is_contiguous(), name, ": expected to be contiguous");
  return writable<float>(tensor);
}

// `tensor`, which must have the shape and type of x, `ready`.
inline Tensor alike(const char* name, const Tensor& tensor, const Tensor& x) {
  check_type(name, tensor, x.scalar_type(), x);
  check_shape(name, tensor, {x.size(0), x.size(1)});
  return ready(tensor);
}

inline OptionalTensor alike(const char* name, const OptionalTensor& tensor, const Tensor& x) {
  return tensor ? OptionalTensor(alike(name, *tensor, x)) : std::nullopt;
}

inline Tensor work_space(const Tensor& x) {
  return torch::stable::new_empty(x, {rtdetr::kMaxRowBlocks * 2 * x.size(1)}, ScalarType::Float);
}

}  // namespace
