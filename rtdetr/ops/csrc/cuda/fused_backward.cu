// Backward of the fused call: recomputes locations and weights, runs backward() on them, and propagates its gradients to
// reference, offsets and logits. Intermediate results are in the scratch buffer.
#include "points.cuh"

namespace rtdetr::cuda {
namespace {

constexpr int kBlock = 128;
constexpr int kLanes = 4;  // lanes per item

// The item of this thread's group. Groups past the last item repeat it, to keep warps whole for the shuffles.
struct Group {
  int64_t index;
  int lane;
  bool valid;
};

__device__ __forceinline__ Group find_group(const Shape& shape) {
  const int64_t index = (int64_t(blockIdx.x) * kBlock + threadIdx.x) / kLanes;
  const bool valid = index < shape.num_items;
  return {valid ? index : shape.num_items - 1, int(threadIdx.x % kLanes), valid};
}

template <class T>
__global__ void __launch_bounds__(kBlock)
    points_kernel(const FusedPoints<T> points, const __grid_constant__ LevelTable levels, Acc<T>* __restrict__ locations,
                  Acc<T>* __restrict__ weights, const __grid_constant__ Shape shape) {
  const Group group = find_group(shape);
  const auto source = points.item(group.index, group.lane, kLanes, shape);
  if (!group.valid) return;
  for (int p = group.lane; p < shape.level_points; p += kLanes) {
    const int level_index = shape.level_of(p);
    const Sample<Acc<T>> sample = points.sample(source, p, level_index, levels[level_index]);
    const int64_t point = group.index * shape.level_points + p;
    reinterpret_cast<Two<Acc<T>>*>(locations)[point] = {sample.x, sample.y};
    weights[point] = sample.weight;
  }
}

// Softmax: grad_logit = weight * (grad_weight - sum of weight * grad_weight over the item).
template <class T>
__global__ void __launch_bounds__(kBlock)
    logits_kernel(const Acc<T>* __restrict__ weights, const Acc<T>* __restrict__ grad_weights, T* __restrict__ grad_logits,
                  const __grid_constant__ Shape shape) {
  using A = Acc<T>;
  const Group group = find_group(shape);
  const int64_t first = group.index * shape.level_points;
  A mean = 0;
  for (int p = group.lane; p < shape.level_points; p += kLanes)
    mean = fused_multiply_add(weights[first + p], grad_weights[first + p], mean);
  for (int step = kLanes / 2; step > 0; step /= 2) mean += __shfl_xor_sync(kFullWarp, mean, step);
  if (!group.valid) return;
  for (int p = group.lane; p < shape.level_points; p += kLanes)
    grad_logits[first + p] = narrow<T>(weights[first + p] * (grad_weights[first + p] - mean));
}

template <class T>
__global__ void __launch_bounds__(kBlock)
    offsets_kernel(const FusedPoints<T> points, const __grid_constant__ LevelTable levels,
                   const Acc<T>* __restrict__ grad_locations, T* __restrict__ grad_offsets,
                   const __grid_constant__ Shape shape) {
  using A = Acc<T>;
  const int64_t point = int64_t(blockIdx.x) * kBlock + threadIdx.x, num_points = shape.num_items * shape.level_points;
  if (point >= num_points) return;
  const int64_t item = divide(point, shape.level_points, num_points), query = divide(item, shape.heads, num_points);
  const int level_index = shape.level_of(int(point - item * shape.level_points));
  const Two<A> step = points.step(points.box(query, level_index), levels[level_index]);
  const Two<A> moved = load_two(grad_locations + 2 * point);
  store_pair(grad_offsets + 2 * point, moved.x * step.x, moved.y * step.y);
}

// One warp per (query, level of reference) sums the gradients of the points of all heads.
template <class T>
__global__ void __launch_bounds__(kBlock)
    reference_kernel(const FusedPoints<T> points, const Acc<T>* __restrict__ grad_locations,
                     Acc<T>* __restrict__ grad_reference, const int64_t count, const __grid_constant__ Shape shape) {
  using A = Acc<T>;
  const int64_t row = int64_t(blockIdx.x) * (kBlock / 32) + threadIdx.x / 32;
  if (row >= count) return;
  const int lane = threadIdx.x % 32;
  const int64_t query = divide(row, points.reference_levels, count);
  const int level = int(row - query * points.reference_levels);
  const int share = points.reference_levels > 1 ? shape.points : shape.level_points;  // points of a head that use this row
  A sums[4] = {};
  for (int i = lane; i < shape.heads * share; i += 32) {
    const int head = i / share;
    const int64_t point = (query * shape.heads + head) * shape.level_points + level * share + i - head * share;
    const Two<A> moved = load_two(grad_locations + 2 * point);
    sums[0] += moved.x;
    sums[1] += moved.y;
    sums[2] += moved.x * widen(points.offsets[2 * point]) * points.box_scale;
    sums[3] += moved.y * widen(points.offsets[2 * point + 1]) * points.box_scale;
  }
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    for (int step = 16; step > 0; step /= 2) sums[k] += __shfl_xor_sync(kFullWarp, sums[k], step);
    if (lane == 0 && k < points.reference_channels) grad_reference[row * points.reference_channels + k] = sums[k];
  }
}

struct Scratch {
  int64_t weights, grad_locations, grad_weights, backward;  // offsets in bytes; locations come first
};

Scratch lay_out(const Sizes& sizes) {
  const int64_t num_points = sizes.B * sizes.Q * sizes.H * sizes.L * sizes.P;
  const int64_t bytes = (num_points * (sizes.dtype == DType::f64 ? 8 : 4) + 255) / 256 * 256;
  return {2 * bytes, 3 * bytes, 5 * bytes, 6 * bytes};
}

}  // namespace

int64_t fused_backward_scratch_bytes(const Sizes& sizes, const Levels& levels, bool deterministic) {
  return lay_out(sizes).backward + backward_scratch_bytes(sizes, levels, deterministic);
}

const char* fused_backward(const Sizes& sizes, const Levels& levels, const void* grad_output, const void* value,
                           const Fused& fused, void* grad_value, void* grad_reference, void* grad_offsets,
                           void* grad_logits, void* scratch, bool deterministic, void* stream) {
  if (const char* error = check_sizes(sizes, levels)) return error;
  const auto queue = static_cast<cudaStream_t>(stream);
  return with_type(sizes.dtype, [&](auto zero) -> const char* {
    using T = decltype(zero);
    using A = Acc<T>;
    const Shape shape = make_shape(sizes, 1);
    const LevelTable table = make_levels(sizes, levels);
    const FusedPoints<T> points(sizes, fused);
    const Scratch at = lay_out(sizes);
    auto* const bytes = static_cast<char*>(scratch);
    const auto part = [&](int64_t offset) { return reinterpret_cast<A*>(bytes + offset); };
    A *const locations = part(0), *const weights = part(at.weights);
    A* const grad_locations = grad_offsets || grad_reference ? part(at.grad_locations) : nullptr;
    A* const grad_weights = grad_logits ? part(at.grad_weights) : nullptr;
    const int64_t num_points = shape.num_items * shape.level_points, rows = sizes.B * sizes.Q * fused.reference_levels;
    const int blocks = ceil_div(shape.num_items, kBlock / kLanes);

    if (num_points > 0) points_kernel<T><<<blocks, kBlock, 0, queue>>>(points, table, locations, weights, shape);
    if (const char* error = launch_error()) return error;
    if (const char* error = backward(sizes, levels, grad_output, value, locations, weights, grad_value, grad_locations,
                                     grad_weights, bytes + at.backward, deterministic, stream))
      return error;
    if (grad_logits && num_points > 0)
      logits_kernel<T><<<blocks, kBlock, 0, queue>>>(weights, grad_weights, static_cast<T*>(grad_logits), shape);
    if (grad_offsets && num_points > 0)
      offsets_kernel<T><<<ceil_div(num_points, kBlock), kBlock, 0, queue>>>(points, table, grad_locations,
                                                                            static_cast<T*>(grad_offsets), shape);
    if (grad_reference && rows > 0)
      reference_kernel<T><<<ceil_div(rows, kBlock / 32), kBlock, 0, queue>>>(points, grad_locations,
                                                                             static_cast<A*>(grad_reference), rows, shape);
    return launch_error();
  });
}

}  // namespace rtdetr::cuda
