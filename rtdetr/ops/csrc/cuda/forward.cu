// Forward: each item is the weighted sum of its L * P points, each interpolated bilinearly from four cells.
#include "points.cuh"

namespace rtdetr::cuda {
namespace {

constexpr int kChunk = 16;  // points of an item staged in shared memory at a time

// Read instead of the corners of a point outside the map: a cell of the map may hold inf, and 0 * inf is NaN.
__device__ const uint4 zero_channels = {0, 0, 0, 0};

// kLanes: lanes per item (0: shape.lanes). kSplit: lane groups that share an item's points, for problems too small to
// fill the device. kPoints: L * P (0: shape.level_points). kWarps: warps per block. A single-warp block frees its slot
// as soon as its warp ends, which shortens the tail of a launch. If each multiprocessor gets only a few blocks, larger
// blocks start sooner.
template <class T, int kSplit, int kPoints>  // points whose corner loads are in flight together
constexpr int kAheadOf = kPoints == 12 && (kSplit > 1 || sizeof(T) == 2) ? 3 : 2;

template <class T, int kLanes, int kSplit, int kPoints, int kWarps>
constexpr int kResidentBlocks =
    kLanes == 0 ? 1 : kResident<(kWarps == 1 && kAheadOf<T, kSplit, kPoints> == 3 ? 24 : 28) / kWarps, 32 * kWarps>;

template <class T, int V, int kLanes, int kSplit, int kPoints, int kWarps, class Points>
__global__ void __launch_bounds__(32 * kWarps, kResidentBlocks<T, kLanes, kSplit, kPoints, kWarps>)
    forward_kernel(const T* __restrict__ value, const __grid_constant__ LevelTable levels, const Points points,
                   T* __restrict__ output, const __grid_constant__ Shape shape) {
  using A = Acc<T>;
  constexpr int kBlock = 32 * kWarps, kMaxItems = kLanes ? kBlock / (kLanes * kSplit) : kBlock / 4;
  // Padded by one entry, so that the items of a warp read from different banks.
  constexpr int kPitch = (kPoints ? kPoints : kChunk) + 1;
  constexpr int kAhead = kAheadOf<T, kSplit, kPoints>;
  constexpr int kPerLane = (kPitch - 2) / (kLanes ? kLanes * kSplit : 4) + 1;
  __shared__ Four<A> corner_weights[kMaxItems * kPitch];
  __shared__ int4 corners[kMaxItems * kPitch];

  const int lanes = kLanes ? kLanes : shape.lanes, group = lanes * kSplit;
  const unsigned slot = threadIdx.x / group;
  const int lane = threadIdx.x % group, channel_lane = lane % lanes, part = lane / lanes;
  const int64_t order = int64_t(blockIdx.x) * (kBlock / group) + slot;
  const bool valid = order < shape.num_items;
  const Item item = find_item(valid ? order : shape.num_items - 1, shape);  // keeps warps whole
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
      for (int i = 0; i < kPerLane; ++i) {  // issues all loads before the first use
        const int p = min(lane + i * group, count - 1), level_index = shape.level_of(first + p);
        samples[i] = points.sample(source, first + p, level_index, levels[level_index]);
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
        for (int j = 0; j < kAhead; ++j) {  // issues all loads before the first use
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

template <class T, int V, int kLanes, int kSplit, int kPoints, int kWarps, class Points>
const char* launch(const Sizes& sizes, const Levels& levels, const void* value, const Points& points, void* output,
                   cudaStream_t stream) {
  Shape shape = make_shape(sizes, V);
  if (kPoints != 12) shape.head_major = sizes.Q >= 100 && sizes.D * sizeof(T) >= 128;  // measured on random shapes
  const int items_per_block = 32 * kWarps / ((kLanes ? kLanes : shape.lanes) * kSplit);
  const int blocks = ceil_div(shape.num_items, items_per_block);
  forward_kernel<T, V, kLanes, kSplit, kPoints, kWarps><<<blocks, 32 * kWarps, 0, stream>>>(
      static_cast<const T*>(value), make_levels(sizes, levels), points, static_cast<T*>(output), shape);
  return launch_error();
}

template <class T, class Points>
const char* dispatch(const Sizes& sizes, const Levels& levels, const void* value, const Points& points, void* output,
                     cudaStream_t stream) {
  if constexpr (sizeof(T) <= 4) {
    constexpr int V = 16 / sizeof(T), kLanes = 32 / V;
    const int64_t items = sizes.B * sizes.Q * sizes.H, level_points = sizes.L * sizes.P;
    if (sizes.D == 32 && level_points == 12) {
      // Thresholds measured on random shapes on an H200, where a 16-bit launch of 24 K items is one wave.
      const bool narrow = sizeof(T) == 2, one_wave = narrow && items > 10 * 1024 && items <= 24 * 1024;
      if (items <= (narrow ? 7 : 3) * 1024) return launch<T, V, kLanes, 4, 12, 4>(sizes, levels, value, points, output, stream);
      if (items <= 48 * 1024 && !one_wave) return launch<T, V, kLanes, 2, 12, 1>(sizes, levels, value, points, output, stream);
      return launch<T, V, kLanes, 1, 12, 1>(sizes, levels, value, points, output, stream);
    }
    if (sizes.D == 32 && level_points == 16)
      return launch<T, V, kLanes, 1, 16, sizeof(T) == 4 ? 1 : 4>(sizes, levels, value, points, output, stream);
    if (sizes.D == 16) return launch<T, 4, 4, 1, 0, 4>(sizes, levels, value, points, output, stream);
    if (sizes.D % V == 0) return launch<T, V, 0, 1, 0, 4>(sizes, levels, value, points, output, stream);
  }
  return launch<T, 1, 0, 1, 0, 4>(sizes, levels, value, points, output, stream);
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

const char* fused_forward(const Sizes& sizes, const Levels& levels, const void* value, const Fused& fused, void* output,
                          void* stream) {
  if (const char* error = check_sizes(sizes, levels)) return error;
  if (sizes.B * sizes.Q * sizes.H * sizes.D == 0) return nullptr;
  return with_type(sizes.dtype, [&](auto zero) {
    using T = decltype(zero);
    return dispatch<T>(sizes, levels, value, FusedPoints<T>(sizes, fused), output, static_cast<cudaStream_t>(stream));
  });
}

}  // namespace rtdetr::cuda
