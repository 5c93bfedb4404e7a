// Gradient of 16-bit values for small problems, in one launch. One block per tile of pixels of a (batch, head, level) reads
// all points of that level, keeps those that touch the tile, sorts them by cell, and gathers. It needs no zeroing, no
// atomics in global memory and no cast. Each point is read once per tile, which does not pay for many points. On coarse
// levels, where many points touch a pixel, tiles are lower and several lane groups share a pixel.
#include "backward.cuh"

namespace rtdetr::cuda {
namespace {

constexpr int kBlock = 256;
constexpr int kTileWidth = 8, kTileHeight = 16;  // at most
constexpr float kPointsPerGroup = 8;  // points per pixel above which more lane groups share it
constexpr int kRow = kTileWidth + 1, kCells = kRow * (kTileHeight + 1);  // cells that touch a tile: one more on each axis
constexpr int kBatch = 5;  // points whose loads are in flight together
constexpr int kShared = 40 * 1024;  // bytes for all points of a level: all may touch one tile

// Shared memory per point: its entry, its cell and rank within the cell (one int), and its slot in the sorted order.
constexpr int kPointBytes = sizeof(Entry<float>) + 2 * sizeof(int);

// How a level is divided into tiles. 2^log_split lane groups share a pixel.
struct Cut {
  int log_split, tile_height, tiles_per_row, tiles;
};

__host__ __device__ inline Cut cut_level(const Shape& shape, int height, int width) {
  const float points_per_pixel = 4.0f * float(shape.queries) * float(shape.points) / (float(height) * float(width) + 1.0f);
  Cut cut{0, kTileHeight, ceil_div(width, kTileWidth), 0};
  while (shape.lanes << cut.log_split < 32 && points_per_pixel > kPointsPerGroup * float(1 << cut.log_split)) ++cut.log_split;
  cut.tile_height >>= cut.log_split;
  cut.tiles = cut.tiles_per_row * ceil_div(height, cut.tile_height);
  return cut;
}

template <class T, int V, int kLanes>
__global__ void __launch_bounds__(kBlock, kLanes ? kResident<6, kBlock> : 1)
    tile_kernel(const T* __restrict__ grad_output, const __grid_constant__ LevelTable levels,
                const float* __restrict__ locations, const float* __restrict__ weights, T* __restrict__ grad_value,
                const __grid_constant__ Shape shape) {
  extern __shared__ __align__(16) char shared[];
  __shared__ int counts[kCells + 1], listed;
  const int num_points = shape.queries * shape.points;
  auto* const entries = reinterpret_cast<Entry<float>*>(shared);
  int *const cell_of_entry = reinterpret_cast<int*>(entries + num_points), *const order = cell_of_entry + num_points;

  // Adjacent blocks write adjacent heads. The last level, with the most points per pixel, goes first.
  int tile = int(blockIdx.x / unsigned(shape.heads)), level_index = shape.levels - 1;
  const int head = int(blockIdx.x) - tile * shape.heads;
  const int64_t batch = blockIdx.y;
  Level level = levels[level_index];
  Cut cut = cut_level(shape, level.height, level.width);
  while (level_index > 0 && tile >= cut.tiles) {
    tile -= cut.tiles;
    level = levels[--level_index];
    cut = cut_level(shape, level.height, level.width);
  }
  const int tile_y = tile / cut.tiles_per_row, tile_height = cut.tile_height;
  const int left = (tile - tile_y * cut.tiles_per_row) * kTileWidth, top = tile_y * tile_height;

  for (int i = threadIdx.x; i <= kCells; i += kBlock) counts[i] = 0;
  if (threadIdx.x == 0) listed = 0;
  __syncthreads();
  const int64_t first = (batch * shape.queries * shape.heads + head) * shape.level_points + level_index * shape.points;
  const auto list = [&](int query, float weight, const Cell<float>& cell) {
    const int x = cell.x + 1 - left, y = cell.y + 1 - top;
    if (!cell.inside || x < 0 || x >= kRow || y < 0 || y > tile_height) return;
    const int position = atomicAdd(&listed, 1), rank = atomicAdd(counts + y * kRow + x, 1);
    entries[position] = {cell.fraction_x, cell.fraction_y, weight, query};
    cell_of_entry[position] = rank * kCells + y * kRow + x;
  };
  for_each_point<kBlock, kBatch, 0>(locations, weights, level, shape, first, list);
  __syncthreads();

  // Prefix sum: counts become the position of each cell's first point.
  if (threadIdx.x < 32) {
    constexpr int kShare = kCells / 32 + 1;
    const int own = threadIdx.x * kShare;
    int count[kShare], sum = 0;
#pragma unroll
    for (int i = 0; i < kShare; ++i) sum += count[i] = own + i <= kCells ? counts[own + i] : 0;
    int position = sum;
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(kFullWarp, position, step);
      if (threadIdx.x >= step) position += before;
    }
    position -= sum;
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      if (own + i <= kCells) counts[own + i] = position;
      position += count[i];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < listed; i += kBlock) {
    const int rank = cell_of_entry[i] / kCells;
    order[counts[cell_of_entry[i] - rank * kCells] + rank] = i;
  }
  __syncthreads();

  const int lanes = kLanes ? kLanes : shape.lanes, lane = threadIdx.x % lanes, group = threadIdx.x / lanes;
  const int split = 1 << cut.log_split, part = group & (split - 1), step = (kBlock / lanes) >> cut.log_split;
  const uint32_t row = uint32_t(shape.heads * shape.channels);
  const T* gradient = grad_output + (batch * shape.queries * shape.heads + head) * shape.channels;
  for (int pixel = group >> cut.log_split; pixel < kTileWidth * tile_height; pixel += step) {  // same count in all lanes
    const int column = pixel % kTileWidth, line = pixel / kTileWidth, x = left + column, y = top + line;
    const bool valid = x < level.width && y < level.height;
    const int64_t cell = batch * shape.cells + level.start + y * level.width + x;
    for (int channel = lane * V; channel - lane * V < shape.channels; channel += lanes * V) {
      const bool has_channels = valid && channel < shape.channels;
      float sums[V] = {};
#pragma unroll
      for (int r = 0; r < 2; ++r) {  // the cells above the pixel, then those below: one run each
        const int first_cell = (line + r) * kRow + column;
        const int middle = counts[first_cell + 1], end = has_channels ? counts[first_cell + 2] : 0;
#pragma unroll 4
        for (int k = counts[first_cell] + part; k < end; k += split) {
          const Entry<float> entry = entries[order[k]];
          const float across = k < middle ? entry.fraction_x : 1 - entry.fraction_x;  // pixel is the left cell's right corner
          const float share = across * (r == 0 ? entry.fraction_y : 1 - entry.fraction_y) * entry.weight;
          const auto channels = Channels<T, V>::load(gradient + channel + uint64_t(uint32_t(entry.query)) * row);
#pragma unroll
          for (int i = 0; i < V; ++i) sums[i] = fused_multiply_add(share, channels[i], sums[i]);
        }
      }
      for (int other = lanes; other < lanes << cut.log_split; other *= 2)
#pragma unroll
        for (int i = 0; i < V; ++i) sums[i] += __shfl_xor_sync(kFullWarp, sums[i], other);
      if (has_channels && part == 0)
        Channels<T, V>::store(grad_value + (cell * shape.heads + head) * shape.channels + channel, sums);
    }
  }
}

int64_t count_tiles(const Shape& shape, const Levels& levels) {
  int64_t tiles = 0;
  for (int l = 0; l < shape.levels; ++l) tiles += cut_level(shape, int(levels.hw[2 * l]), int(levels.hw[2 * l + 1])).tiles;
  return tiles;
}

template <class T, int V, int kLanes> const char* launch(const Backward& call, const Levels& levels) {
  const Shape shape = make_shape(call.sizes, V);
  const dim3 blocks(unsigned(count_tiles(shape, levels) * call.sizes.H), unsigned(call.sizes.B));
  const int bytes = int(call.sizes.Q * call.sizes.P) * kPointBytes;
  tile_kernel<T, V, kLanes><<<blocks, kBlock, bytes, call.stream>>>(
      static_cast<const T*>(call.grad_output), call.levels, static_cast<const float*>(call.locations),
      static_cast<const float*>(call.weights), static_cast<T*>(call.grad_value), shape);
  return launch_error();
}

}  // namespace

// Not for float32: zeroing the gradient and reducing in place was always faster.
bool tiles_fit(const Sizes& sizes) {
  return element_size(sizes.dtype) == 2 && sizes.B <= 65535 && sizes.Q * sizes.P * kPointBytes <= kShared;
}

const char* tiled_value_gradient(const Backward& call, const Levels& levels) {
  return with_type(call.sizes.dtype, [&](auto zero) -> const char* {
    using T = decltype(zero);
    if constexpr (sizeof(T) == 2) {
      if (call.sizes.D == 32) return launch<T, 8, 4>(call, levels);
      if (call.sizes.D == 16) return launch<T, 4, 4>(call, levels);
      if (call.sizes.D % 8 == 0) return launch<T, 8, 0>(call, levels);
      return launch<T, 1, 0>(call, levels);
    }
    return "tiles are for 16-bit values";
  });
}

}  // namespace rtdetr::cuda
