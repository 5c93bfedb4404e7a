// Deformable aggregation: one block per anchor; its lanes own channels. The (point, camera) pairs that lie within an image
// are listed first, so that no others are processed. The cells of all their levels are then staged in shared memory, once
// for all groups. Locations and weights are read from global memory.
#include "../deformable_aggregation.h"
#include "reductions.cuh"

#include <type_traits>

namespace rtdetr::cuda {
namespace {

constexpr int kBlock = 128;
constexpr int kEntries = 128;  // (pair, level) staged in shared memory at a time
constexpr int kMoves = 256;    // (pair, group) location gradients buffered for the sum over groups
constexpr int kAhead = 2;      // entries whose corner loads are in flight together (forward)

struct Dims {
  int64_t anchors;  // per batch item
  int cells, groups, channels;  // channels per group
  int pairs, cameras, levels;   // pairs: points * cameras
  int lanes;                    // lanes per group of channels
  int round;                    // pairs staged at a time
};

// One level of a pair. `index` is pair * levels + level; the mask is 0 outside the map.
template <class A> struct alignas(8) Entry {
  A fraction_x, fraction_y, width, height;
  int index, mask;
};

template <class A> struct Staged {
  Entry<A> entries[kEntries];
  int4 corners[kEntries];
  int pairs[kBlock];
  int warp_counts[kBlock / 32];
};

// A slot is a set of adjacent lanes. Slots divide the groups of channels among them and, if there are more slots than
// groups, also the entries (`part` of `parts`).
struct Slot {
  int lane, group, part, parts, slots;
  bool used;
};

__device__ __forceinline__ Slot find_slot(const Dims& dims, int lanes) {
  const int slots = kBlock / lanes, slot = threadIdx.x / lanes, parts = max(slots / dims.groups, 1);
  const int part = parts > 1 ? slot / dims.groups : 0;
  return {int(threadIdx.x) % lanes, slot - part * dims.groups, part, parts, slots, part < parts};
}

// Of kBlock pairs from `first` on, lists those within an image, in order; returns how many. NaN counts as within.
template <class A>
__device__ __forceinline__ int list_pairs(const A* locations, int first, Staged<A>& staged, const Dims& dims) {
  const int pair = first + threadIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Two<A> at = pair < dims.pairs ? load_two(locations + 2 * pair) : Two<A>{A(-1), A(-1)};
  const bool counts = !(at.x <= A(0) || at.x >= A(1) || at.y <= A(0) || at.y >= A(1));
  const unsigned ballot = __ballot_sync(kFullWarp, counts);
  __syncthreads();  // the previous list has been read
  if (lane == 0) staged.warp_counts[warp] = __popc(ballot);
  __syncthreads();
  int before = 0, total = 0;
#pragma unroll
  for (int w = 0; w < kBlock / 32; ++w) {
    before += w < warp ? staged.warp_counts[w] : 0;
    total += staged.warp_counts[w];
  }
  if (counts) staged.pairs[before + __popc(ballot & ((1u << lane) - 1))] = pair;
  return total;
}

// Stages the entries of `count` listed pairs, from `begin` on, in shared memory.
template <class A>
__device__ __forceinline__ void stage(const A* locations, int begin, int count, Staged<A>& staged, const LevelTable& levels,
                                      const Dims& dims) {
  __syncthreads();  // the list is written, the previous entries have been read
  for (int e = threadIdx.x; e < count * dims.levels; e += kBlock) {
    const int listed = e / dims.levels, level_index = e - listed * dims.levels, pair = staged.pairs[begin + listed];
    const Level level = levels[pair % dims.cameras * dims.levels + level_index];
    const Two<A> location = load_two(locations + 2 * pair);
    const Cell<A> cell = locate(location.x, location.y, level);
    int4 corners = corner_cells(cell, level, Shape{0, dims.cells});
    corners.x = max(corners.x, 0);
    staged.entries[e] = {cell.fraction_x, cell.fraction_y, A(level.width), A(level.height), pair * dims.levels + level_index,
                         corner_mask(cell, level)};
    staged.corners[e] = corners;
  }
  __syncthreads();
}

template <class T, int V, int kLanes>
__global__ void __launch_bounds__(kBlock, kLanes ? kResident<8, kBlock> : 1)
    aggregate_kernel(const T* __restrict__ features, const __grid_constant__ LevelTable levels,
                     const Acc<T>* __restrict__ locations, const Acc<T>* __restrict__ weights, T* __restrict__ output,
                     const __grid_constant__ Dims dims) {
  using A = Acc<T>;
  __shared__ Staged<A> staged;
  __shared__ A shared_sums[kBlock * V];
  const int lanes = kLanes ? kLanes : dims.lanes;
  const Slot slot = find_slot(dims, lanes);
  const int64_t anchor = blockIdx.x, row = int64_t(dims.groups) * dims.channels;
  locations += anchor * dims.pairs * 2;
  weights += anchor * dims.pairs * dims.levels * dims.groups;
  features += anchor / dims.anchors * dims.cells * row;

  for (int first_group = 0; first_group < dims.groups; first_group += slot.slots) {
    for (int first_channel = 0; first_channel < dims.channels; first_channel += lanes * V) {
      const int group = first_group + slot.group, channel = first_channel + slot.lane * V;
      const bool used = slot.used && group < dims.groups && channel < dims.channels;
      const T* own = features + (used ? group * dims.channels + channel : 0);
      const A* own_weights = weights + (used ? group : 0);
      A sums[V] = {};
      for (int first = 0; first < dims.pairs; first += kBlock) {
        const int listed = list_pairs(locations, first, staged, dims);
        for (int begin = 0; begin < listed; begin += dims.round) {
          const int count = min(dims.round, listed - begin), entries = count * dims.levels;
          stage(locations, begin, count, staged, levels, dims);
          for (int e = used ? slot.part : entries; e < entries; e += slot.parts * kAhead) {
            Channels<T, V> corner[kAhead][4];
            A weight[kAhead];
#pragma unroll
            for (int j = 0; j < kAhead; ++j) {  // issues all loads before the first use
              const int at = min(e + j * slot.parts, entries - 1);
              const int4 cells = staged.corners[at];
              corner[j][0] = Channels<T, V>::load(own + cells.x * row);
              corner[j][1] = Channels<T, V>::load(own + cells.y * row);
              corner[j][2] = Channels<T, V>::load(own + cells.z * row);
              corner[j][3] = Channels<T, V>::load(own + cells.w * row);
              weight[j] = __ldg(own_weights + int64_t(staged.entries[at].index) * dims.groups);
            }
#pragma unroll
            for (int j = 0; j < kAhead; ++j) {
              if (e + j * slot.parts >= entries) break;
              const Entry<A> entry = staged.entries[e + j * slot.parts];
              const A right = entry.fraction_x, bottom = entry.fraction_y * weight[j];
              const A left = A(1) - right, top = (A(1) - entry.fraction_y) * weight[j];
              const A outside = (right + bottom) * A(0);  // 0, or NaN for a NaN location or weight
              const A share[4] = {entry.mask & 1 ? top * left : outside, entry.mask & 2 ? top * right : outside,
                                  entry.mask & 4 ? bottom * left : outside, entry.mask & 8 ? bottom * right : outside};
#pragma unroll
              for (int c = 0; c < 4; ++c)
#pragma unroll
                for (int i = 0; i < V; ++i) sums[i] = fused_multiply_add(share[c], corner[j][c][i], sums[i]);
            }
          }
        }
      }
      __syncthreads();  // the previous sums have been read
#pragma unroll
      for (int i = 0; i < V; ++i) shared_sums[i * kBlock + threadIdx.x] = sums[i];
      __syncthreads();
      if (!used || slot.part > 0) continue;
      for (int p = 1; p < slot.parts; ++p)
#pragma unroll
        for (int i = 0; i < V; ++i) sums[i] += shared_sums[i * kBlock + threadIdx.x + p * dims.groups * lanes];
      Channels<T, V>::store(output + anchor * row + group * dims.channels + channel, sums);
    }
  }
}

// Gradients of locations and weights by dot products, that of features by atomic reductions. Null: not needed.
template <class T, int V, int kLanes>
__global__ void __launch_bounds__(kBlock, kLanes ? kResident<8, kBlock> : 1)
    aggregate_backward_kernel(const T* __restrict__ grad_output, const T* __restrict__ features,
                              const __grid_constant__ LevelTable levels, const Acc<T>* __restrict__ locations,
                              const Acc<T>* __restrict__ weights, Acc<T>* __restrict__ grad_features,
                              Acc<T>* __restrict__ grad_locations, Acc<T>* __restrict__ grad_weights,
                              const __grid_constant__ Dims dims) {
  using A = Acc<T>;
  __shared__ Staged<A> staged;
  __shared__ Two<A> moves[kMoves];
  const int lanes = kLanes ? kLanes : dims.lanes;
  const Slot slot = find_slot(dims, lanes);
  const int64_t anchor = blockIdx.x, row = int64_t(dims.groups) * dims.channels;
  const int64_t map = anchor / dims.anchors * dims.cells * row, first_pair = anchor * dims.pairs;
  locations += first_pair * 2;
  grad_output += anchor * row;

  for (int first = 0; first < dims.pairs; first += kBlock) {
    const int listed = list_pairs(locations, first, staged, dims);
    for (int begin = 0; begin < listed; begin += dims.round) {
      const int count = min(dims.round, listed - begin);
      stage(locations, begin, count, staged, levels, dims);
      // Idle slots keep their warps whole for the shuffles: they read pair 0 of group 0, and write nothing.
      for (int next = 0; next < count; next += slot.parts) {
        for (int first_group = 0; first_group < dims.groups; first_group += slot.slots) {
          const bool used = slot.used && next + slot.part < count && first_group + slot.group < dims.groups;
          const int pair = used ? next + slot.part : 0, group = used ? first_group + slot.group : 0;
          A by_x = 0, by_y = 0;
          for (int e = pair * dims.levels; e < (pair + 1) * dims.levels; ++e) {
            const Entry<A> entry = staged.entries[e];
            const int4 corners = staged.corners[e];
            const int cell[4] = {corners.x, corners.y, corners.z, corners.w};
            const int64_t at = (first_pair * dims.levels + entry.index) * dims.groups + group;
            const A weight = __ldg(weights + at);
            const A right = entry.fraction_x, bottom = entry.fraction_y, left = A(1) - right, top = A(1) - bottom;
            const A part[4] = {top * left, top * right, bottom * left, bottom * right};
            A dot[4] = {};
            for (int channel = slot.lane * V; channel < dims.channels; channel += lanes * V) {
              const int64_t own = group * dims.channels + channel;
              const auto gradient = Channels<T, V>::load(grad_output + own);
              Channels<T, V> value[4];
#pragma unroll
              for (int c = 0; c < 4; ++c) value[c] = Channels<T, V>::load(features + map + cell[c] * row + own);
#pragma unroll
              for (int c = 0; c < 4; ++c) {
#pragma unroll
                for (int i = 0; i < V; ++i) dot[c] = fused_multiply_add(gradient[i], value[c][i], dot[c]);
                if (grad_features == nullptr || !used || !(entry.mask >> c & 1)) continue;
                A sums[V];
#pragma unroll
                for (int i = 0; i < V; ++i) sums[i] = gradient[i] * (weight * part[c]);
                reduce_add<V>(grad_features + map + cell[c] * row + own, sums);
              }
            }
#pragma unroll
            for (int c = 0; c < 4; ++c) dot[c] = entry.mask >> c & 1 ? dot[c] : A(0);
            by_x += weight * entry.width * (top * (dot[1] - dot[0]) + bottom * (dot[3] - dot[2]));
            by_y += weight * entry.height * (left * (dot[2] - dot[0]) + right * (dot[3] - dot[1]));
            A by_weight = part[0] * dot[0] + part[1] * dot[1] + part[2] * dot[2] + part[3] * dot[3];
            for (int step = 1; step < lanes; step *= 2) by_weight += __shfl_xor_sync(kFullWarp, by_weight, step);
            if (grad_weights != nullptr && used && slot.lane == 0) grad_weights[at] = by_weight;
          }
          for (int step = 1; step < lanes; step *= 2) {
            by_x += __shfl_xor_sync(kFullWarp, by_x, step);
            by_y += __shfl_xor_sync(kFullWarp, by_y, step);
          }
          if (used && slot.lane == 0) moves[pair * dims.groups + group] = {by_x, by_y};
        }
      }
      __syncthreads();
      if (grad_locations == nullptr) continue;
      for (int i = threadIdx.x; i < count; i += kBlock) {
        Two<A> sum = {0, 0};
        for (int group = 0; group < dims.groups; ++group) {
          sum.x += moves[i * dims.groups + group].x;
          sum.y += moves[i * dims.groups + group].y;
        }
        store_two(grad_locations + (first_pair + staged.pairs[begin + i]) * 2, sum.x, sum.y);
      }
    }
  }
}

// ---- host side ----------------------------------------------------------------------------------------------------

const char* check_sizes(const AggregationSizes& n, const Levels& levels) {
  if (n.S > INT32_MAX || n.B * n.A > INT32_MAX || n.C > INT32_MAX) return "S, B * A and C must each be below 2^31";
  if (n.P * n.N * n.L > INT32_MAX / 2) return "P * N * L must be below 2^30";
  if (n.L > kEntries || n.G > kMoves) return "at most 128 levels and 256 groups are possible";
  if (levels.hw != nullptr && n.N * n.L > kMaxHostLevels) return "more than 32 maps need their sizes in device memory";
  return nullptr;
}

Dims make_dims(const AggregationSizes& n, int width) {
  const int channels = int(n.C / n.G);
  int lanes = 4;
  while (lanes < 32 && lanes * width < channels) lanes *= 2;
  const int round = min(kEntries / int(n.L), kMoves / int(n.G));
  return {n.A, int(n.S), int(n.G), channels, int(n.P * n.N), int(n.N), int(n.L), lanes, round};
}

LevelTable make_maps(const AggregationSizes& n, const Levels& levels) {
  return make_levels(Sizes{n.dtype, n.B, n.S, n.G, n.C / n.G, n.A, n.N * n.L, n.P}, levels);
}

// Calls launch(V, kLanes) for `channels` channels per group; kLanes may be 0. kMost: most channels per lane.
template <int kMost, class Launch> const char* with_width(int64_t channels, const Launch& launch) {
  constexpr int V = kMost;
  if (channels == 32 && V > 1)
    launch(std::integral_constant<int, V>{}, std::integral_constant<int, V == 1 ? 0 : 32 / V>{});
  else if (channels % V == 0)
    launch(std::integral_constant<int, V>{}, std::integral_constant<int, 0>{});
  else
    launch(std::integral_constant<int, 1>{}, std::integral_constant<int, 0>{});
  return launch_error();
}

template <class T>
const char* backward_of(const AggregationSizes& n, const Levels& levels, const void* grad_output, const void* features,
                        const void* locations, const void* weights, void* grad_features, Acc<T>* sums,
                        void* grad_locations, void* grad_weights, cudaStream_t stream) {
  using A = Acc<T>;
  const int64_t pairs = n.B * n.A * n.P * n.N, count = n.B * n.S * n.C;
  cudaError_t error = cudaSuccess;
  const auto zero = [&](void* address, int64_t numbers) {
    if (address != nullptr && error == cudaSuccess) error = cudaMemsetAsync(address, 0, numbers * sizeof(A), stream);
  };
  zero(sums, count);
  zero(grad_locations, 2 * pairs);
  zero(grad_weights, pairs * n.L * n.G);
  if (error != cudaSuccess) return memory_error(error);
  if (pairs * count * n.L > 0) {
    const char* failed = with_width<sizeof(T) <= 4 ? 4 : 1>(n.C / n.G, [&](auto width, auto lanes) {
      aggregate_backward_kernel<T, width(), lanes()><<<unsigned(n.B * n.A), kBlock, 0, stream>>>(
          static_cast<const T*>(grad_output), static_cast<const T*>(features), make_maps(n, levels),
          static_cast<const A*>(locations), static_cast<const A*>(weights), sums, static_cast<A*>(grad_locations),
          static_cast<A*>(grad_weights), make_dims(n, width()));
    });
    if (failed != nullptr) return failed;
  }
  if constexpr (sizeof(T) < 4) {
    if (sums == nullptr || count == 0) return nullptr;
    cast_kernel<T><<<ceil_div(count, 8 * 256), 256, 0, stream>>>(sums, static_cast<T*>(grad_features), count);
  }
  return launch_error();
}

}  // namespace

const char* aggregate(const AggregationSizes& n, const Levels& levels, const void* features, const void* locations,
                      const void* weights, void* output, void* stream) {
  if (const char* error = check_sizes(n, levels)) return error;
  if (n.B * n.A * n.C == 0) return nullptr;
  const auto queue = static_cast<cudaStream_t>(stream);
  return with_type(n.dtype, [&](auto zero) -> const char* {
    using T = decltype(zero);
    if (n.P * n.N * n.L * n.S == 0) return memory_error(cudaMemsetAsync(output, 0, n.B * n.A * n.C * sizeof(T), queue));
    return with_width<sizeof(T) <= 4 ? int(16 / sizeof(T)) : 1>(n.C / n.G, [&](auto width, auto lanes) {
      aggregate_kernel<T, width(), lanes()><<<unsigned(n.B * n.A), kBlock, 0, queue>>>(
          static_cast<const T*>(features), make_maps(n, levels), static_cast<const Acc<T>*>(locations),
          static_cast<const Acc<T>*>(weights), static_cast<T*>(output), make_dims(n, width()));
    });
  });
}

int64_t aggregate_backward_scratch_bytes(const AggregationSizes& n) {
  return element_size(n.dtype) == 2 ? n.B * n.S * n.C * int64_t(sizeof(float)) : 0;
}

const char* aggregate_backward(const AggregationSizes& n, const Levels& levels, const void* grad_output,
                               const void* features, const void* locations, const void* weights, void* grad_features,
                               void* grad_locations, void* grad_weights, void* scratch, void* stream) {
  if (const char* error = check_sizes(n, levels)) return error;
  return with_type(n.dtype, [&](auto zero) -> const char* {
    using T = decltype(zero);
    void* const sums = grad_features != nullptr && sizeof(T) < 4 ? scratch : grad_features;
    return backward_of<T>(n, levels, grad_output, features, locations, weights, grad_features, static_cast<Acc<T>*>(sums),
                          grad_locations, grad_weights, static_cast<cudaStream_t>(stream));
  });
}

}  // namespace rtdetr::cuda
