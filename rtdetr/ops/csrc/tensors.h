// Helpers for all operators: tensor checks, map sizes, gradients, and running a kernel.
#pragma once

#include "ms_deform_attn.h"

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

#ifdef RTDETR_LIBRARY_CUDA
constexpr bool on_cuda = true;
#else
constexpr bool on_cuda = false;
#endif

inline std::string shape_of(const Tensor& tensor) {
  std::string text = "(";
  for (int64_t i = 0; i < tensor.dim(); ++i) text += (i ? ", " : "") + std::to_string(tensor.size(i));
  return text + ")";
}

inline void check_shape(const char* name, const Tensor& tensor, const std::vector<int64_t>& expected) {
  bool same = tensor.dim() == static_cast<int64_t>(expected.size());
  std::string text;
  for (size_t i = 0; i < expected.size(); ++i) {
    same = same && tensor.size(static_cast<int64_t>(i)) == expected[i];
    text += (i ? ", " : "") + std::to_string(expected[i]);
  }
  STD_TORCH_CHECK(same, name, ": expected shape (", text, "), got ", shape_of(tensor));
}

inline void check_type(const char* name, const Tensor& tensor, ScalarType expected, const Tensor& value) {
  STD_TORCH_CHECK(tensor.scalar_type() == expected, name, ": expected ", torch::headeronly::toString(expected), " beside ",
                  torch::headeronly::toString(value.scalar_type()), " values, got ",
                  torch::headeronly::toString(tensor.scalar_type()));
  STD_TORCH_CHECK((on_cuda ? tensor.is_cuda() : tensor.is_cpu()) && tensor.get_device_index() == value.get_device_index(),
                  name, ": expected on the device of value, got another one");
}

inline rtdetr::DType kernel_type(const Tensor& value) {
  switch (value.scalar_type()) {
    case ScalarType::Float: return rtdetr::DType::f32;
    case ScalarType::Double: return rtdetr::DType::f64;
    case ScalarType::Half: return rtdetr::DType::f16;
    case ScalarType::BFloat16: return rtdetr::DType::bf16;
    default: break;
  }
  STD_TORCH_CHECK(false, "value: expected float32, float64, float16 or bfloat16, got ",
                  torch::headeronly::toString(value.scalar_type()));
}

inline ScalarType compute_type(const Tensor& value) {
  return value.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

template <class T = void> const T* pointer(const Tensor& tensor) { return static_cast<const T*>(tensor.const_data_ptr()); }
template <class T = void> T* writable(const Tensor& tensor) { return static_cast<T*>(tensor.mutable_data_ptr()); }

inline const void* pointer(const OptionalTensor& tensor) { return tensor ? pointer(*tensor) : nullptr; }

// Contiguous, and aligned for the loads of the kernels: 16 bytes on a GPU, one element on a CPU. Copies contiguous views
// whose offset breaks the alignment.
inline Tensor ready(const Tensor& tensor) {
  const Tensor made = tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
  const auto address = reinterpret_cast<uintptr_t>(pointer(made));
  return address % (on_cuda ? 16 : made.element_size()) == 0 ? made : torch::stable::clone(made);
}

// Map sizes for a kernel; those on the host are checked. Owns the memory that rtdetr::Levels points to.
class LevelTable {
 public:
  LevelTable(int64_t maps, int64_t cells, std::vector<int64_t> hw, const OptionalTensor& shapes, const OptionalTensor& starts)
      : maps_(maps), cells_(cells), hw_(std::move(hw)) {
    STD_TORCH_CHECK(hw_.empty() || !shapes, "hw and spatial_shapes: give one of the two");
    if (shapes) from_tensors(*shapes, starts);
    if (!levels_.device_shapes) check_on_host();
    if (starts_ && !levels_.device_shapes) check_starts();
  }

  const rtdetr::Levels& levels() {
    if (!levels_.device_shapes) levels_.hw = hw_.data();
    return levels_;
  }

 private:
  void from_tensors(const Tensor& shapes, const OptionalTensor& starts) {
    STD_TORCH_CHECK(shapes.scalar_type() == ScalarType::Long, "spatial_shapes: expected int64");
    check_shape("spatial_shapes", shapes, {maps_, 2});
    STD_TORCH_CHECK(starts && starts->scalar_type() == ScalarType::Long,
                    "level_start_index: expected an int64 tensor beside a tensor of spatial_shapes");
    check_shape("level_start_index", *starts, {maps_});
    STD_TORCH_CHECK(shapes.is_cuda() == on_cuda && starts->is_cuda() == on_cuda,
                    "spatial_shapes and level_start_index: expected on the device of value");
    shapes_ = ready(shapes);
    starts_ = ready(*starts);
    const auto* hw = pointer<int64_t>(*shapes_);
    const auto* first = pointer<int64_t>(*starts_);
    if (on_cuda) {
      levels_.device_shapes = hw;
      levels_.device_starts = first;
      return;
    }
    hw_.assign(hw, hw + 2 * maps_);
  }

  void check_starts() const {
    const auto* first = pointer<int64_t>(*starts_);
    for (int64_t l = 0, start = 0; l < maps_; start += hw_[2 * l] * hw_[2 * l + 1], ++l) {
      STD_TORCH_CHECK(first[l] == start, "level_start_index: expected level ", l, " to start at cell ", start,
                      ", after the levels before it, got ", first[l]);
    }
  }

  void check_on_host() const {
    STD_TORCH_CHECK(static_cast<int64_t>(hw_.size()) == 2 * maps_, "spatial_shapes: expected ", maps_,
                    " pairs (height, width), as many levels as sampling_locations has, got ", hw_.size() / 2);
    int64_t cells = 0, level = 0;
    for (int64_t l = 0; l < maps_; ++l) {
      STD_TORCH_CHECK(hw_[2 * l] > 0 && hw_[2 * l + 1] > 0, "spatial_shapes: expected positive sizes, got (", hw_[2 * l],
                      ", ", hw_[2 * l + 1], ") at level ", l);
      STD_TORCH_CHECK(!__builtin_mul_overflow(hw_[2 * l], hw_[2 * l + 1], &level) &&
                          !__builtin_add_overflow(cells, level, &cells),
                      "spatial_shapes: the levels hold 2^63 cells or more, but value has ", cells_);
    }
    STD_TORCH_CHECK(cells == cells_, "spatial_shapes: the levels hold ", cells, " cells, but value has ", cells_);
  }

  const int64_t maps_, cells_;
  std::vector<int64_t> hw_;
  OptionalTensor shapes_, starts_;
  rtdetr::Levels levels_;
};

// An empty tensor if the gradient is not needed: the schemas have no optional outputs.
inline Tensor gradient(const Tensor& like, bool needed) {
  return needed ? torch::stable::new_empty(like, like.sizes()) : torch::stable::new_empty(like, {0});
}

inline void* gradient_pointer(const Tensor& tensor, bool needed) { return needed ? writable(tensor) : nullptr; }

#ifdef RTDETR_LIBRARY_CUDA
namespace kernels = rtdetr::cuda;

// Runs a kernel on the device of `tensor`. Its last argument is that device's current stream. Raises the error it returns.
template <typename Kernel, typename... Arguments>
void run(const char* op, const Tensor& tensor, Kernel kernel, const Arguments&... arguments) {
  torch::stable::accelerator::DeviceGuard guard(tensor.get_device_index());
  void* stream = nullptr;
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream) == AOTI_TORCH_SUCCESS, op,
                  ": the current CUDA stream could not be read");
  const char* error = kernel(arguments..., stream);
  STD_TORCH_CHECK(error == nullptr, op, ": ", error);
}
#else
namespace kernels = rtdetr::cpu;

inline void parallel_for(int64_t count, int64_t grain, void (*body)(int64_t, int64_t, void*), void* context) {
  STD_TORCH_CHECK(torch_parallel_for(0, count, grain, body, context) == AOTI_TORCH_SUCCESS, "a thread failed");
}

// Runs a kernel on torch's threads. Raises the error it returns.
template <typename Kernel, typename... Arguments>
void run(const char* op, const Tensor&, Kernel kernel, const Arguments&... arguments) {
  const char* error = kernel(arguments..., parallel_for);
  STD_TORCH_CHECK(error == nullptr, op, ": ", error);
}
#endif

}  // namespace
