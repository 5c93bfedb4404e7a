// Helpers for the operators over rows of channels: tensor checks and pointers.
#pragma once

#include "rows.h"
#include "tensors.h"

namespace {

inline rtdetr::Rows rows_of(const Tensor& x) {
  STD_TORCH_CHECK(x.dim() == 2 && x.size(0) > 0 && x.size(1) % rtdetr::kRowAlignment == 0 && x.is_contiguous(),
                  "x: expected contiguous rows (N, C), C a multiple of ", rtdetr::kRowAlignment, ", got ", shape_of(x));
  STD_TORCH_CHECK(x.scalar_type() != ScalarType::Double, "x: expected float32 or a type of 16 bits, got float64");
  return {pointer(x), kernel_type(x), x.size(0), x.size(1)};
}

inline const float* floats(const char* name, const Tensor& tensor, const Tensor& x, const std::vector<int64_t>& shape) {
  check_type(name, tensor, ScalarType::Float, x);
  check_shape(name, tensor, shape);
  STD_TORCH_CHECK(tensor.is_contiguous() && reinterpret_cast<uintptr_t>(pointer(tensor)) % 16 == 0, name,
                  ": expected to be contiguous and to start at a multiple of 16 bytes");
  return static_cast<const float*>(pointer(tensor));
}

inline const void* alike(const char* name, const Tensor& tensor, const Tensor& x) {
  check_type(name, tensor, x.scalar_type(), x);
  check_shape(name, tensor, {x.size(0), x.size(1)});
  STD_TORCH_CHECK(tensor.is_contiguous(), name, ": expected to be contiguous");
  return pointer(tensor);
}

inline Tensor work_space(const Tensor& x) {
  return torch::stable::new_empty(x, {rtdetr::kMaxRowBlocks * 2 * x.size(1)}, ScalarType::Float);
}

inline float* writable(const Tensor& tensor) { return static_cast<float*>(tensor.mutable_data_ptr()); }

}  // namespace
