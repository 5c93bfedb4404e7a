// Forward: every item sums its L * P points, each a bilinear blend of four cells.
#include <cmath>

#include "common.cuh"

namespace rtdetr::cuda {
namespace {

constexpr int kBlock = 128;
constexpr int kChunk = 16;  // points of an item that are staged at once

// Read in place of the corners of a point outside the map: a cell of the map may hold inf, and 0 * inf is NaN.
__device__ const uint4 zero_channels = {0, 0, 0, 0};

template <class A> struct Sample {
  A x, y, weight;
};

// Points as the plain call has them.
template <class T> struct GivenPoints {
  const Acc<T>* locations;
  const Acc<T>* weights;

  struct Source {
    const Acc<T>* location;
    const Acc<T>* weight;
  };
  __device__ __forceinline__ Source item(int64_t index, int, int, const Shape& shape) const {
    return {locations + index * shape.level_points * 2, weights + index * shape.level_points};
  }
  __device__ __forceinline__ Sample<Acc<T>> sample(const Source& item, int point, int, const Level&, const Shape&) const {
    const Two<Acc<T>> location = load_two(item.location + 2 * point);
    return {location.x, location.y, __ldg(item.weight + point)};
  }
};

// Points as the module has them: reference, raw offsets, logits. The lanes of an item take the softmax together.
template <class T> struct FusedPoints {
  using A = Acc<T>;
  const A* reference;
  const T* offsets;
  const T* logits;
  int reference_levels, reference_channels;
  A box_scale;  // offset_scale / P

  struct Source {
    const A* reference;
    const T* offset;
    const T* logit;
    A maximum, inverse_sum;
  };

  __device__ __forceinline__ Source item(int64_t index, int lane, int lanes, const Shape& shape) const {
    Source item;
    const int64_t query = divide(index, shape.heads, shape.num_items);
    item.reference = reference + query * reference_levels * reference_channels;
    item.offset = offsets + index * shape.level_points * 2;
    item.logit = logits + index * shape.level_points;
    item.maximum = A(-INFINITY);
    for (int p = lane; p < shape.level_points; p += lanes) item.maximum = fmax(item.maximum, widen(item.logit[p]));
    for (int step = lanes / 2; step > 0; step /= 2)
      item.maximum = fmax(item.maximum, __shfl_xor_sync(kFullWarp, item.maximum, step));
    A sum = 0;
    for (int p = lane; p < shape.level_points; p += lanes) sum += exp(widen(item.logit[p]) - item.maximum);
    for (int step = lanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kFullWarp, sum, step);
    item.inverse_sum = A(1) / sum;
    return item;
  }

  __device__ __forceinline__ Sample<A> sample(const Source& item, int point, int level_index, const Level& level,
                                              const Shape&) const {
    const A* ref = item.reference + (reference_levels > 1 ? level_index * reference_channels : 0);
    const A dx = widen(item.offset[2 * point]), dy = widen(item.offset[2 * point + 1]);
    const bool box = reference_channels == 4;
    const A scale_x = box ? ref[2] * box_scale : A(1) / A(level.width);
    const A scale_y = box ? ref[3] * box_scale : A(1) / A(level.height);
    const A weight = exp(widen(item.logit[point]) - item.maximum) * item.inverse_sum;
    return {ref[0] + dx * scale_x, ref[1] + dy * scale_y, weight};
  }
};

// kLanes: lanes per item (0: shape.lanes); kSplit: lane groups that share an item's points, for problems too small to
// fill the device; kPoints: L * P (0: shape.level_points).
template <class T, int V, int kLanes, int kSplit, int kPoints, class Points>
__global__ void __launch_bounds__(kBlock, kLanes ? 7 : 1)
    forward_kernel(const T* __restrict__ value, const __grid_constant__ LevelTable levels, const Points points,
                   T* __restrict__ output, const __grid_constant__ Shape shape) {
  using A = Acc<T>;
  constexpr int kMaxItems = kLanes ? kBlock / (kLanes * kSplit) : kBlock / 4;
  // One entry of padding: the items of a warp read from different banks.
  constexpr int kPitch = (kPoints ? kPoints : kChunk) + 1;
  constexpr int kAhead = kSplit > 1 && kPoints == 12 ? 3 : 2;  // points whose corners are in flight together
  constexpr int kPerLane = (kPitch - 2) / (kLanes ? kLanes * kSplit : 4) + 1;
  __shared__ Four<A> corner_weights[kMaxItems * kPitch];
  __shared__ int4 corners[kMaxItems * kPitch];

  const int lanes = kLanes ? kLanes : shape.lanes, group = lanes * kSplit;
  const unsigned slot = threadIdx.x / group;
  const int lane = threadIdx.x % group, channel_lane = lane % lanes, part = lane / lanes;
  const int64_t order = int64_t(blockIdx.x) * (kBlock / group) + slot;
  const bool valid = order < shape.num_items;
  const Item item = find_item(valid ? order : shape.num_items - 1, shape);  // keeps whole warps together
  const int level_points = kPoints ? kPoints : shape.level_points;
  const uint32_t pitch = uint32_t(shape.heads * shape.channels) * sizeof(T);
  const int64_t origin = (item.batch * shape.cells * shape.heads + item.head) * shape.channels;
  const char* map = reinterpret_cast<const char*>(value + origin);
  const typename Points::Source source = points.item(item.index, lane, group, shape);

  for (int channel = channel_lane * V; channel - channel_lane * V < shape.channels; channel += lanes * V) {
    const bool has_channels = channel < shape.channels;
    const char* base = map + (has_channels ? channel : 0) * sizeof(T);
    A sums[V] = {};
    for (int first = 0; first < level_points; first += kChunk) {
      const int count = kPoints ? kPoints : min(kChunk, level_points - first);
      __syncwarp();
      Sample<A> samples[kPerLane];
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {  // all loads before the first use
        const int p = min(lane + i * group, count - 1), level_index = shape.level_of(first + p);
        samples[i] = points.sample(source, first + p, level_index, levels[level_index], shape);
      }
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const int p = lane + i * group;
        if (p >= count) break;
        const Level level = levels[shape.level_of(first + p)];
        const Sample<A> sample = samples[i];
        const Cell<A> cell = locate(sample.x, sample.y, level);
        const int mask = corner_mask(cell, level);
        const A right = cell.fraction_x, bottom = cell.fraction_y * sample.weight;
        const A left = A(1) - right, top = (A(1) - cell.fraction_y) * sample.weight;
        const A outside = (right + bottom) * A(0);  // 0, or NaN for a NaN location or weight
        corner_weights[slot * kPitch + p] = {mask & 1 ? top * left : outside, mask & 2 ? top * right : outside,
                                             mask & 4 ? bottom * left : outside, mask & 8 ? bottom * right : outside};
        corners[slot * kPitch + p] = corner_cells(cell, level, shape);
      }
      __syncwarp();
#pragma unroll 2
      for (int p = part; p < count; p += kSplit * kAhead) {
        Channels<T, V> corner[kAhead][4];
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {  // all loads before the first use
          const int4 cell = corners[slot * kPitch + min(p + j * kSplit, count - 1)];
          const bool inside = cell.x >= 0;
          const char* row = inside ? base : reinterpret_cast<const char*>(&zero_channels);
          corner[j][0] = Channels<T, V>::load(row + uint64_t(uint32_t(inside ? cell.x : 0)) * pitch);
          corner[j][1] = Channels<T, V>::load(row + uint64_t(uint32_t(cell.y)) * pitch);
          corner[j][2] = Channels<T, V>::load(row + uint64_t(uint32_t(cell.z)) * pitch);
          corner[j][3] = Channels<T, V>::load(row + uint64_t(uint32_t(cell.w)) * pitch);
        }
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
          if (p + j * kSplit >= count) break;
          const Four<A> weight = corner_weights[slot * kPitch + p + j * kSplit];
#pragma unroll
          for (int i = 0; i < V; ++i) {
            sums[i] = fused_multiply_add(weight.x, corner[j][0][i], sums[i]);
            sums[i] = fused_multiply_add(weight.y, corner[j][1][i], sums[i]);
            sums[i] = fused_multiply_add(weight.z, corner[j][2][i], sums[i]);
            sums[i] = fused_multiply_add(weight.w, corner[j][3][i], sums[i]);
          }
        }
      }
    }
#pragma unroll
    for (int step = lanes; step < lanes * kSplit; step *= 2)
#pragma unroll
      for (int i = 0; i < V; ++i) sums[i] += __shfl_xor_sync(kFullWarp, sums[i], step);
    if (valid && part == 0 && has_channels) Channels<T, V>::store(output + item.index * shape.channels + channel, sums);
  }
}

template <class T, int V, int kLanes, int kSplit, int kPoints, class Points>
const char* launch(const Sizes& sizes, const Levels& levels, const void* value, const Points& points, void* output,
                   cudaStream_t stream) {
  const Shape shape = make_shape(sizes, V);
  const int items_per_block = kBlock / ((kLanes ? kLanes : shape.lanes) * kSplit);
  const int blocks = ceil_div(shape.num_items, items_per_block);
  forward_kernel<T, V, kLanes, kSplit, kPoints><<<blocks, kBlock, 0, stream>>>(
      static_cast<const T*>(value), make_levels(sizes, levels), points, static_cast<T*>(output), shape);
  return launch_error();
}

template <class T, class Points>
const char* dispatch(const Sizes& sizes, const Levels& levels, const void* value, const Points& points, void* output,
                     cudaStream_t stream) {
  if constexpr (sizeof(T) <= 4) {
    constexpr int V = 16 / sizeof(T), kLanes = 32 / V;
    const int64_t threads = sizes.B * sizes.Q * sizes.H * kLanes, level_points = sizes.L * sizes.P;
    if (sizes.D == 32 && level_points == 12) {
      if (threads <= 48 * 1024) return launch<T, V, kLanes, 4, 12>(sizes, levels, value, points, output, stream);
      if constexpr (sizeof(T) == 2)
        if (threads <= 192 * 1024)
          return launch<T, V, kLanes, 2, 12>(sizes, levels, value, points, output, stream);
      return launch<T, V, kLanes, 1, 12>(sizes, levels, value, points, output, stream);
    }
    if (sizes.D == 32 && level_points == 16)
      return launch<T, V, kLanes, 1, 16>(sizes, levels, value, points, output, stream);
    if (sizes.D % V == 0) return launch<T, V, 0, 1, 0>(sizes, levels, value, points, output, stream);
  }
  return launch<T, 1, 0, 1, 0>(sizes, levels, value, points, output, stream);
}

}  // namespace

const char* forward(const Sizes& sizes, const Levels& levels, const void* value, const void* locations, const void* weights,
                    void* output, void* stream) {
  if (const char* error = check_sizes(sizes, levels)) return error;
  if (sizes.B * sizes.Q * sizes.H * sizes.D == 0) return nullptr;
  const auto queue = static_cast<cudaStream_t>(stream);
  return with_type(sizes.dtype, [&](auto zero) {
    using T = decltype(zero);
    const GivenPoints<T> points{static_cast<const Acc<T>*>(locations), static_cast<const Acc<T>*>(weights)};
    return dispatch<T>(sizes, levels, value, points, output, queue);
  });
}

const char* fused_forward(const Sizes& sizes, const Levels& levels, const void* value, const void* reference,
                          int64_t reference_levels, int64_t reference_channels, double offset_scale, const void* offsets,
                          const void* logits, void* output, void* stream) {
  if (const char* error = check_sizes(sizes, levels)) return error;
  if (sizes.B * sizes.Q * sizes.H * sizes.D == 0) return nullptr;
  const auto queue = static_cast<cudaStream_t>(stream);
  return with_type(sizes.dtype, [&](auto zero) {
    using T = decltype(zero);
    const FusedPoints<T> points{static_cast<const Acc<T>*>(reference), static_cast<const T*>(offsets),
                                static_cast<const T*>(logits), int(reference_levels), int(reference_channels),
                                Acc<T>(offset_scale / double(sizes.P))};
    return dispatch<T>(sizes, levels, value, points, output, queue);
  });
}

}  // namespace rtdetr::cuda
