// Backward: selects the algorithm for the gradient of value and launches its parts.
#include "backward.cuh"

namespace rtdetr::cuda {
namespace {

enum class ValueGradient { tiled, sorted, reduced };

// Tiles read every point many times. Sorting has the fixed cost of several launches. Reductions must zero a float gradient
// and, for 16-bit values, cast it. Chooses by estimated times in microseconds, fitted to measurements on an H200 for 255
// (16-bit) and 425 (wider) random shapes. They depend on the numbers of points, values and pixels of all heads, and on the
// points per pixel of the coarsest level.
ValueGradient choose(const Sizes& sizes, const Levels& levels, bool deterministic) {
  if (deterministic) return ValueGradient::sorted;
  if (levels.hw == nullptr) return ValueGradient::reduced;
  const double millions = 1e-6 * double(sizes.B * sizes.H);
  const double points = millions * double(sizes.Q * sizes.L * sizes.P);
  int64_t cells = 0, least = INT64_MAX;
  for (int64_t l = 0; l < sizes.L; ++l) {
    const int64_t of_level = levels.hw[2 * l] * levels.hw[2 * l + 1];
    cells += of_level;
    if (of_level > 0) least = min(least, of_level);
  }
  const double pixels = millions * double(cells), values = pixels * double(sizes.D), read = points * double(sizes.D) / 32;
  const double looks = 1e-3 * double(sizes.Q * sizes.P);  // points that a block reads, in thousands
  const double crowd = looks / double(least) * double(max(sizes.D, int64_t(32)));
  if (element_size(sizes.dtype) > 2) {
    const double sorted = 9.6 + 1.1 * looks + 105 * read + 2.9 * values + 2.2 * crowd;
    const double reduced = 5.8 + 27 * points + 130 * read + 1.6 * values + 1.4 * crowd;
    return sorted <= reduced ? ValueGradient::sorted : ValueGradient::reduced;
  }
  const double tiled = 6.8 + 2.2 * looks + 101 * read + 70 * pixels + 3.25 * crowd;
  const double sorted = 11.5 + 1.4 * looks + 79 * read + 21 * pixels + 1.3 * values + 2 * crowd;
  const double reduced = 7.5 + 159 * read + 2.6 * values;
  if (tiles_fit(sizes) && tiled <= min(sorted, reduced)) return ValueGradient::tiled;
  return sorted <= reduced ? ValueGradient::sorted : ValueGradient::reduced;
}

// A second stream, one per host thread and device, for work concurrent with later work on `main`. It starts after the work
// submitted to `main` so far; after join(), `main` waits for it.
class Beside {
 public:
  explicit Beside(cudaStream_t main) : main_(main) {
    thread_local Tools of_device[kMaxDevices];
    int device = 0;
    keep(cudaGetDevice(&device));
    if (error_ == cudaSuccess && device >= kMaxDevices) return;  // the work runs on `main`
    tools_ = &of_device[device];
    if (tools_->stream == nullptr) {
      keep(cudaStreamCreateWithFlags(&tools_->stream, cudaStreamNonBlocking));
      keep(cudaEventCreateWithFlags(&tools_->fork, cudaEventDisableTiming));
      keep(cudaEventCreateWithFlags(&tools_->join, cudaEventDisableTiming));
    }
    keep(cudaEventRecord(tools_->fork, main_));
    keep(cudaStreamWaitEvent(tools_->stream, tools_->fork));
  }

  cudaStream_t stream() const { return tools_ != nullptr ? tools_->stream : main_; }

  const char* join() {
    if (tools_ != nullptr) {
      keep(cudaEventRecord(tools_->join, tools_->stream));
      keep(cudaStreamWaitEvent(main_, tools_->join));
    }
    return memory_error(error_);
  }

 private:
  static constexpr int kMaxDevices = 64;
  struct Tools {
    cudaStream_t stream = nullptr;
    cudaEvent_t fork = nullptr, join = nullptr;
  };

  void keep(cudaError_t error) { error_ = error_ == cudaSuccess ? error : error_; }

  const cudaStream_t main_;
  Tools* tools_ = nullptr;
  cudaError_t error_ = cudaSuccess;
};

}  // namespace

int64_t backward_scratch_bytes(const Sizes& sizes, const Levels& levels, bool deterministic) {
  if (sizes.B * sizes.S * sizes.Q * sizes.H * sizes.D * sizes.L * sizes.P == 0) return 0;
  switch (choose(sizes, levels, deterministic)) {
    case ValueGradient::tiled: return 0;
    case ValueGradient::sorted: return sorted_scratch_bytes(sizes, levels, deterministic);
    case ValueGradient::reduced: break;
  }
  return reduction_scratch_bytes(sizes);
}

const char* backward(const Sizes& sizes, const Levels& levels, const void* grad_output, const void* value,
                     const void* locations, const void* weights, void* grad_value, void* grad_locations,
                     void* grad_weights, void* scratch, bool deterministic, void* stream) {
  if (const char* error = check_sizes(sizes, levels)) return error;
  const Backward call{sizes,      make_levels(sizes, levels), grad_output,  value, locations, weights, grad_value,
                      grad_locations, grad_weights, static_cast<char*>(scratch), static_cast<cudaStream_t>(stream)};
  const int64_t num_points = sizes.B * sizes.Q * sizes.H * sizes.L * sizes.P;
  if (num_points * sizes.S * sizes.D == 0) {  // no point samples any value: all gradients are zero
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
  const bool by_points = grad_locations != nullptr || grad_weights != nullptr;
  if (grad_value == nullptr) return by_points ? point_gradients(call, false) : nullptr;
  const ValueGradient way = choose(sizes, levels, deterministic);
  if (way == ValueGradient::reduced) return point_gradients(call, true);
  const auto by_value = [&] {
    return way == ValueGradient::tiled ? tiled_value_gradient(call, levels)
                                       : sorted_value_gradient(call, levels, deterministic);
  };
  if (!by_points) return by_value();
  // The gradient of value has few blocks, which mostly wait for memory: the other gradients run beside it.
  Beside beside(call.stream);
  const char* error = by_value();
  if (error == nullptr) {
    Backward second = call;
    second.stream = beside.stream();
    error = point_gradients(second, false);
  }
  const char* joined = beside.join();
  return error != nullptr ? error : joined;
}

}  // namespace rtdetr::cuda
