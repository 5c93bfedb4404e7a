// Backward: which algorithm, and in which order its parts run.
#include "backward.cuh"

namespace rtdetr::cuda {
namespace {

// Sorting has a fixed cost of several launches; reductions have to zero a float gradient, and to cast it for 16-bit
// values.
bool use_sort(const Sizes& sizes, const Levels& levels, bool deterministic) {
  const int64_t few = element_size(sizes.dtype) == 2 ? 150000 : 600000;
  return deterministic || (levels.hw != nullptr && sizes.B * sizes.Q * sizes.H * sizes.L * sizes.P > few);
}

}  // namespace

int64_t backward_scratch_bytes(const Sizes& sizes, const Levels& levels, bool deterministic) {
  if (sizes.B * sizes.S * sizes.Q * sizes.H * sizes.D * sizes.L * sizes.P == 0) return 0;
  return use_sort(sizes, levels, deterministic) ? sorted_scratch_bytes(sizes, levels, deterministic)
                                                : reduction_scratch_bytes(sizes);
}

const char* backward(const Sizes& sizes, const Levels& levels, const void* grad_output, const void* value,
                     const void* locations, const void* weights, void* grad_value, void* grad_locations,
                     void* grad_weights, void* scratch, bool deterministic, void* stream) {
  if (const char* error = check_sizes(sizes, levels)) return error;
  const Backward call{sizes,      make_levels(sizes, levels), grad_output,  value, locations, weights, grad_value,
                      grad_locations, grad_weights, static_cast<char*>(scratch), static_cast<cudaStream_t>(stream)};
  const int64_t num_points = sizes.B * sizes.Q * sizes.H * sizes.L * sizes.P;
  if (num_points * sizes.S * sizes.D == 0) {  // nothing touches anything: all gradients are zero
    const size_t point_bytes = num_points * (sizes.dtype == DType::f64 ? 8 : 4);
    const size_t value_bytes = sizes.B * sizes.S * sizes.H * sizes.D * element_size(sizes.dtype);
    cudaError_t error = cudaSuccess;
    if (grad_value != nullptr) error = cudaMemsetAsync(grad_value, 0, value_bytes, call.stream);
    if (grad_locations != nullptr && error == cudaSuccess)
      error = cudaMemsetAsync(grad_locations, 0, 2 * point_bytes, call.stream);
    if (grad_weights != nullptr && error == cudaSuccess)
      error = cudaMemsetAsync(grad_weights, 0, point_bytes, call.stream);
    return memory_error(error);
  }
  const bool sorted = grad_value != nullptr && use_sort(sizes, levels, deterministic);
  if (sorted)
    if (const char* error = sorted_value_gradient(call, levels, deterministic)) return error;
  const bool reduced = grad_value != nullptr && !sorted;
  if (!reduced && grad_locations == nullptr && grad_weights == nullptr) return nullptr;
  return point_gradients(call, reduced);
}

}  // namespace rtdetr::cuda
