// Gradients of locations and weights, without atomics, and the gradient of value by atomic reductions in global memory.
#include "backward.cuh"
#include "reductions.cuh"

namespace rtdetr::cuda {
namespace {

constexpr int kBlock = 128;
constexpr int kQuad = 4;    // points whose gradients are reduced over the lanes together
constexpr int kChunk = 12;  // points of an item staged in shared memory at a time
constexpr int kSmall = 24 * 1024;

// Sums values[.][j] over the lanes of a group, for four points j at once; lane j < 4 gets the sums of point j. Each of the
// first two steps halves the number of points that a lane holds, which takes fewer shuffles than a full butterfly.
template <class A> __device__ __forceinline__ void sum_to_lanes(A (&values)[3][kQuad], A (&sums)[3], int lanes) {
  const bool upper_pair = threadIdx.x & 2, upper = threadIdx.x & 1;
#pragma unroll
  for (int k = 0; k < 3; ++k) {
    A pair[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const A sent = upper_pair ? values[k][j] : values[k][j + 2], kept = upper_pair ? values[k][j + 2] : values[k][j];
      pair[j] = kept + __shfl_xor_sync(kFullWarp, sent, 2);
    }
    sums[k] = (upper ? pair[1] : pair[0]) + __shfl_xor_sync(kFullWarp, upper ? pair[0] : pair[1], 1);
  }
  for (int step = 4; step < lanes; step *= 2)
#pragma unroll
    for (int k = 0; k < 3; ++k) sums[k] += __shfl_xor_sync(kFullWarp, sums[k], step);
}

// A group of lanes takes `share` points of an item: all of them, or 4 with kReduce or if the problem is too small to fill
// the device.
template <class T, int V, int kLanes, bool kReduce>
__global__ void __launch_bounds__(kBlock, kLanes ? (kReduce ? 5 : V == 8 ? 6 : 8) : 1)
    point_gradients_kernel(const T* __restrict__ grad_output, const T* __restrict__ value,
                           const __grid_constant__ LevelTable levels, const Acc<T>* __restrict__ locations,
                           const Acc<T>* __restrict__ weights, Acc<T>* __restrict__ grad_value,
                           Acc<T>* __restrict__ grad_locations, Acc<T>* __restrict__ grad_weights, const int share,
                           const int shares, const __grid_constant__ Shape shape) {
  using A = Acc<T>;
  constexpr int kMaxGroups = kBlock / (kLanes ? kLanes : 4), kPitch = kChunk + 1;  // padding avoids bank conflicts
  constexpr int kPerLane = kChunk / (kLanes ? kLanes : 4) + (kLanes == 8);
  struct Point {
    A fraction_x, fraction_y, weight;
    int mask;
  };
  __shared__ alignas(16) Point points[kMaxGroups * kPitch];
  __shared__ int4 corners[kMaxGroups * kPitch];

  const int lanes = kLanes ? kLanes : shape.lanes;
  const int slot = threadIdx.x / lanes, lane = threadIdx.x % lanes;
  int64_t index = int64_t(blockIdx.x) * (kBlock / lanes) + slot;
  const bool valid = index < shape.num_items * shares;
  if (!valid) index = shape.num_items * shares - 1;  // repeats the last group to keep warps whole; writes nothing
  const int64_t order = shares > 1 ? divide(index, shares, shape.num_items * shares) : index;
  const int begin = int(index - order * shares) * share, end = min(begin + share, shape.level_points);
  const Item item = find_item(order, shape);

  const uint32_t row = uint32_t(shape.heads * shape.channels);  // elements from one cell to the next
  const int64_t map = (item.batch * shape.cells * shape.heads + item.head) * shape.channels;
  const int64_t first_point = item.index * shape.level_points;
  const bool needs_dots = grad_locations != nullptr || grad_weights != nullptr;

  for (int first = begin; first < begin + share; first += kChunk) {
    const int count = min(kChunk, end - first);
    __syncwarp();
    Two<A> location[kPerLane];
    A weight[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {  // issues all loads before the first use
      const int64_t point = first_point + first + max(min(lane + i * lanes, count - 1), 0);
      location[i] = load_two(locations + 2 * point);
      weight[i] = __ldg(weights + point);
    }
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int p = lane + i * lanes;
      if (p >= min((count + kQuad - 1) / kQuad * kQuad, kChunk)) break;
      const Level level = levels[shape.level_of(min(first + p, shape.level_points - 1))];
      const bool exists = p < count;  // padding of the last quad is outside the map
      const Cell<A> cell = locate(exists ? location[i].x : A(-4), location[i].y, level);
      int4 cells = corner_cells(cell, level, shape);
      cells.x = max(cells.x, 0);
      points[slot * kPitch + p] = {cell.fraction_x, cell.fraction_y, weight[i], corner_mask(cell, level)};
      corners[slot * kPitch + p] = cells;
    }
    __syncwarp();

#pragma unroll 1
    for (int quad = 0; quad < count; quad += kQuad) {
      A partial[3][kQuad] = {};  // gradients by x, y and weight
      for (int channel = lane * V; channel < shape.channels; channel += lanes * V) {
        const auto gradient = Channels<T, V>::load(grad_output + item.index * shape.channels + channel);
#pragma unroll
        for (int j = 0; j < kQuad; ++j) {
          const Point p = points[slot * kPitch + quad + j];
          const int4 cells = corners[slot * kPitch + quad + j];
          const uint32_t cell[4] = {uint32_t(cells.x), uint32_t(cells.y), uint32_t(cells.z), uint32_t(cells.w)};
          const A right = p.fraction_x, bottom = p.fraction_y, left = A(1) - right, top = A(1) - bottom;
          if (!kReduce || needs_dots) {
            A dot[4];
#pragma unroll
            for (int c = 0; c < 4; ++c) {
              const auto v = Channels<T, V>::load(value + map + channel + uint64_t(cell[c]) * row);
              dot[c] = 0;
#pragma unroll
              for (int i = 0; i < V; ++i) dot[c] = fused_multiply_add(gradient[i], v[i], dot[c]);
              dot[c] = p.mask >> c & 1 ? dot[c] : A(0);
            }
            partial[0][j] += p.weight * (top * (dot[1] - dot[0]) + bottom * (dot[3] - dot[2]));
            partial[1][j] += p.weight * (left * (dot[2] - dot[0]) + right * (dot[3] - dot[1]));
            partial[2][j] += top * (left * dot[0] + right * dot[1]) + bottom * (left * dot[2] + right * dot[3]);
          }
          if constexpr (kReduce) {
            const A part[4] = {top * left, top * right, bottom * left, bottom * right};
#pragma unroll
            for (int c = 0; c < 4; ++c) {
              if (!valid || !(p.mask >> c & 1)) continue;
              A sums[V];
#pragma unroll
              for (int i = 0; i < V; ++i) sums[i] = gradient[i] * (p.weight * part[c]);
              reduce_add<V>(grad_value + map + channel + uint64_t(cell[c]) * row, sums);
            }
          }
        }
      }
      if (kReduce && !needs_dots) continue;
      A sums[3];
      sum_to_lanes(partial, sums, lanes);
      if (!valid || lane >= kQuad || quad + lane >= count) continue;
      const int point = first + quad + lane;
      if (grad_locations != nullptr) {
        const Level level = levels[shape.level_of(point)];
        store_two(grad_locations + 2 * (first_point + point), sums[0] * A(level.width), sums[1] * A(level.height));
      }
      if (grad_weights != nullptr) __stcs(grad_weights + first_point + point, sums[2]);
    }
  }
}

template <class T, int V, int kLanes, bool kReduce> const char* launch(const Backward& call, Acc<T>* grad_value) {
  const Shape shape = make_shape(call.sizes, V);
  const int groups = kBlock / (kLanes ? kLanes : shape.lanes);
  const int share = kReduce || shape.num_items * shape.lanes <= kSmall ? kQuad : shape.level_points;
  const int shares = ceil_div(shape.level_points, share);
  const int blocks = ceil_div(shape.num_items * shares, groups);
  point_gradients_kernel<T, V, kLanes, kReduce><<<blocks, kBlock, 0, call.stream>>>(
      static_cast<const T*>(call.grad_output), static_cast<const T*>(call.value), call.levels,
      static_cast<const Acc<T>*>(call.locations), static_cast<const Acc<T>*>(call.weights), grad_value,
      static_cast<Acc<T>*>(call.grad_locations), static_cast<Acc<T>*>(call.grad_weights), share, shares, shape);
  return launch_error();
}

// Reductions use 4 channels per lane for every type: the 4 float sums of a lane are then one 16-byte instruction.
template <class T, bool kReduce> const char* dispatch(const Backward& call, Acc<T>* grad_value) {
  if constexpr (sizeof(T) <= 4) {
    constexpr int V = kReduce ? 4 : 16 / sizeof(T);
    if (call.sizes.D == 32) return launch<T, V, 32 / V, kReduce>(call, grad_value);
    if (call.sizes.D == 16) return launch<T, 4, 4, kReduce>(call, grad_value);
    if (call.sizes.D % V == 0) return launch<T, V, 0, kReduce>(call, grad_value);
  }
  return launch<T, 1, 0, kReduce>(call, grad_value);
}

template <class T> const char* reduce(const Backward& call) {
  const int64_t count = call.sizes.B * call.sizes.S * call.sizes.H * call.sizes.D;
  constexpr bool kInPlace = sizeof(T) >= 4;
  auto* sums = static_cast<Acc<T>*>(kInPlace ? call.grad_value : static_cast<void*>(call.scratch));
  if (const char* error = memory_error(cudaMemsetAsync(sums, 0, count * sizeof(Acc<T>), call.stream))) return error;
  if (const char* error = dispatch<T, true>(call, sums)) return error;
  if constexpr (!kInPlace) {
    cast_kernel<T><<<ceil_div(count, 8 * 256), 256, 0, call.stream>>>(sums, static_cast<T*>(call.grad_value), count);
    return launch_error();
  }
  return nullptr;
}

}  // namespace

int64_t reduction_scratch_bytes(const Sizes& sizes) {
  return element_size(sizes.dtype) == 2 ? sizes.B * sizes.S * sizes.H * sizes.D * int64_t(sizeof(float)) : 0;
}

const char* point_gradients(const Backward& call, bool reduce_value) {
  return with_type(call.sizes.dtype, [&](auto zero) -> const char* {
    using T = decltype(zero);
    return reduce_value ? reduce<T>(call) : dispatch<T, false>(call, nullptr);
  });
}

}  // namespace rtdetr::cuda
