// Gradient of value without float atomics. The points of a (batch, head, level) are sorted by the cell they lie in. Every
// pixel then gathers from the points of the four cells around it, which are two contiguous runs.
//
// The grid of cells has a border: cell (x + 1, y + 1) of a (height + 1) x (width + 1) grid has its upper left corner in
// pixel (x, y), so points that touch the map from outside have a cell too. Points that touch no pixel have none.
#include "backward.cuh"

namespace rtdetr::cuda {
namespace {

constexpr int kSortBlock = 512, kGatherBlock = 256;
constexpr int kBandCells = 11 * 1024;  // most cells counted by one block in shared memory: below 48 KB
constexpr int kSortBlocks = 128;  // least blocks of the sort, even if several must read the same points
constexpr int kTileWidth = 4;
constexpr float kPointsPerGroup = 64;  // points per pixel above which more lane groups share it
constexpr int kBatch = 4;  // points whose loads are in flight together
constexpr int64_t kMaxGridY = 65535;  // batch items of one launch

__host__ __device__ inline int64_t grid_cells(int64_t height, int64_t width) { return (height + 1) * (width + 1); }

// How the blocks and buffers of the sort are divided.
struct SortPlan {
  int bands;       // blocks per (batch, head, level); each places the points of a range of cells
  int64_t cells;   // of all levels, or an upper bound: the pitch of `ends`
  int64_t points;  // Q * P: the pitch of `entries`
  int band_cells;  // most cells of a band
  bool staged;     // entries are sorted in shared memory, then written coalesced
};

// ---- sort ---------------------------------------------------------------------------------------------------------

// Inclusive prefix sum over the threads of the block.
__device__ __forceinline__ int block_scan(int x) {
  __shared__ int warp_sums[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(kFullWarp, x, step);
    if (lane >= step) x += before;
  }
  __syncthreads();
  if (lane == 31) warp_sums[warp] = x;
  __syncthreads();
  if (warp == 0) {
    int sum = lane < kSortBlock / 32 ? warp_sums[lane] : 0;
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(kFullWarp, sum, step);
      if (lane >= step) sum += before;
    }
    warp_sums[lane] = sum;
  }
  __syncthreads();
  return warp > 0 ? x + warp_sums[warp - 1] : x;
}

// The index of a point's cell in the grid, or -1.
template <class A> __device__ __forceinline__ int grid_cell(const Cell<A>& cell, const Level& level) {
  return cell.inside ? (cell.y + 1) * (level.width + 1) + cell.x + 1 : -1;
}

template <class A, int kPoints>
__global__ void __launch_bounds__(kSortBlock)
    sort_kernel(const A* __restrict__ locations, const A* __restrict__ weights, const __grid_constant__ LevelTable levels,
                Entry<A>* __restrict__ entries, int* __restrict__ ends, int* __restrict__ cell_of_entry,
                const SortPlan plan, const __grid_constant__ Shape shape) {
  extern __shared__ __align__(16) int counts[];  // then the staged entries
  const int band = blockIdx.x % plan.bands, batch_head_level = blockIdx.x / plan.bands;
  const int level_index = batch_head_level % shape.levels, batch_head = batch_head_level / shape.levels;
  const Level level = levels[level_index];
  ends += batch_head * plan.cells;
  for (int l = 0; l < level_index; ++l) ends += grid_cells(levels[l].height, levels[l].width);
  entries += batch_head_level * plan.points;
  const int64_t cells = grid_cells(level.height, level.width);
  const int first_cell = int(cells * band / plan.bands), end_cell = int(cells * (band + 1) / plan.bands);
  const int band_cells = end_cell - first_cell;
  auto* const staged = reinterpret_cast<Entry<A>*>(counts + plan.band_cells);
  const int64_t batch = batch_head / shape.heads, head = batch_head % shape.heads;
  const int64_t first = (batch * shape.queries * shape.heads + head) * shape.level_points + level_index * shape.points;

  for (int i = threadIdx.x; i < band_cells; i += kSortBlock) counts[i] = 0;
  __syncthreads();
  int before = 0;  // points in the cells of earlier bands
  const A* const no_weights = nullptr;
  const auto tally = [&](int, A, const Cell<A>& where) {
    const int cell = grid_cell(where, level);
    if (cell >= first_cell && cell < end_cell) atomicAdd(counts + cell - first_cell, 1);
    before += cell >= 0 && cell < first_cell;
  };
  for_each_point<kSortBlock, kBatch, kPoints>(locations, no_weights, level, shape, first, tally);
  before = __syncthreads_or(before) ? block_scan(before) : 0;
  __shared__ int band_start;
  if (threadIdx.x == kSortBlock - 1) band_start = before;
  __syncthreads();

  // Prefix sum: counts become the position of each cell's first point.
  const int share = ceil_div(band_cells, kSortBlock);
  const int own_begin = min(int(threadIdx.x) * share, band_cells), own_end = min(own_begin + share, band_cells);
  int sum = 0;
  for (int i = own_begin; i < own_end; ++i) sum += counts[i];
  int position = band_start + block_scan(sum) - sum;
  for (int i = own_begin; i < own_end; ++i) {
    const int count = counts[i];
    counts[i] = position;
    position += count;
  }
  __syncthreads();

  const auto place = [&](int query, A weight, const Cell<A>& where) {
    const int cell = grid_cell(where, level);
    if (cell < first_cell || cell >= end_cell) return;
    const int position = atomicAdd(counts + cell - first_cell, 1);
    RTDETR_ASSERT(position < plan.points);
    Entry<A>* const target = plan.staged ? staged + position - band_start : entries + position;
    *target = {where.fraction_x, where.fraction_y, weight, query};
    if (cell_of_entry != nullptr) cell_of_entry[batch_head_level * plan.points + position] = cell;
  };
  for_each_point<kSortBlock, kBatch, kPoints>(locations, weights, level, shape, first, place);
  __syncthreads();
  for (int i = threadIdx.x; i < band_cells; i += kSortBlock) ends[first_cell + i] = counts[i];
  const int placed = plan.staged && band_cells > 0 ? counts[band_cells - 1] - band_start : 0;
  for (int i = threadIdx.x; i < placed; i += kSortBlock) entries[band_start + i] = staged[i];
}

// ---- order --------------------------------------------------------------------------------------------------------

template <class A> __device__ __forceinline__ int compare(A a, A b) { return a < b ? -1 : a > b; }

// Deterministic mode: within a cell, the sort leaves the points in the arbitrary order of its atomics. Reorders them by
// (query, location, weight). Equal entries may still swap: their contributions are equal.
template <class A>
__global__ void __launch_bounds__(256)
    order_kernel(const Entry<A>* __restrict__ entries, const int* __restrict__ ends, const int* __restrict__ cell_of_entry,
                 Entry<A>* __restrict__ ordered, const __grid_constant__ LevelTable levels, const SortPlan plan,
                 const int blocks, const __grid_constant__ Shape shape) {
  const int batch_head_level = blockIdx.x / blocks;
  const int64_t own = int64_t(blockIdx.x % blocks) * blockDim.x + threadIdx.x;
  const int level_index = batch_head_level % shape.levels;
  ends += batch_head_level / shape.levels * plan.cells;
  for (int l = 0; l < level_index; ++l) ends += grid_cells(levels[l].height, levels[l].width);
  const Level level = levels[level_index];
  if (own >= ends[grid_cells(level.height, level.width) - 1]) return;

  entries += batch_head_level * plan.points;
  const int cell = cell_of_entry[batch_head_level * plan.points + own];
  const int begin = cell > 0 ? ends[cell - 1] : 0, end = ends[cell];
  const Entry<A> mine = entries[own];
  int rank = 0;
  for (int i = begin; i < end; ++i) {
    const Entry<A> other = entries[i];
    int order = compare(other.query, mine.query);
    if (order == 0) order = compare(other.fraction_x, mine.fraction_x);
    if (order == 0) order = compare(other.fraction_y, mine.fraction_y);
    if (order == 0) order = compare(other.weight, mine.weight);
    rank += order < 0 || (order == 0 && i < own);
  }
  ordered[batch_head_level * plan.points + begin + rank] = mine;
}

// ---- gather -------------------------------------------------------------------------------------------------------

// How a level is divided into blocks: tiles 4 pixels wide, as high as the block's lane groups allow. Several groups share
// a pixel that many points touch, so that coarse levels do not finish last.
struct Tiling {
  Level level;
  int first_cell;   // in `ends`
  int log_split;    // 2^log_split lane groups per pixel
  int tile_height, tiles_per_row, tiles;
};

__host__ __device__ inline Tiling tile_level(const Shape& shape, const Level& level, int first_cell) {
  const float pixels = float(level.height) * float(level.width);
  const float points_per_pixel = 4.0f * float(shape.queries) * float(shape.points) / (pixels + 1.0f);
  Tiling tiling{level, first_cell, 0, 0, 0, 0};
  while (shape.lanes << tiling.log_split < 32 && points_per_pixel > kPointsPerGroup * float(1 << tiling.log_split))
    ++tiling.log_split;
  tiling.tile_height = kGatherBlock / (shape.lanes << tiling.log_split) / kTileWidth;
  tiling.tiles_per_row = ceil_div(level.width, kTileWidth);
  tiling.tiles = tiling.tiles_per_row * ceil_div(level.height, tiling.tile_height);
  return tiling;
}

// Computed on the host if the map sizes are known there.
struct GatherPlan {
  Tiling levels[kMaxHostLevels];
  int tiles;  // of all levels, or an upper bound
};

// Finds the level and tiling of a block; `tile` becomes the index within that level. The last level, with the most points
// per pixel, goes first. Returns the level, or -1 past the last tile if the grid is an upper bound.
template <bool kPlanned>
__device__ __forceinline__ int find_tile(int& tile, Tiling& tiling, const LevelTable& levels, const GatherPlan& plan,
                                         const Shape& shape) {
  int cells = 0;
  for (int l = 0; !kPlanned && l < shape.levels; ++l) cells += int(grid_cells(levels[l].height, levels[l].width));
  for (int l = shape.levels - 1; l >= 0; --l) {
    if constexpr (!kPlanned) {
      const Level level = levels[l];
      cells -= int(grid_cells(level.height, level.width));
      tiling = tile_level(shape, level, cells);
    }
    const int tiles = kPlanned ? plan.levels[l].tiles : tiling.tiles;
    if (tile < tiles) {
      if constexpr (kPlanned) tiling = plan.levels[l];
      return l;
    }
    tile -= tiles;
  }
  return -1;
}

template <class T, int V, int kLanes, bool kPlanned>
__global__ void __launch_bounds__(kGatherBlock, kResident<sizeof(T) == 2 ? 7 : 6, kGatherBlock>)
    gather_kernel(const T* __restrict__ grad_output, const __grid_constant__ LevelTable levels,
                  const Entry<Acc<T>>* __restrict__ entries, const int* __restrict__ ends, T* __restrict__ grad_value,
                  const SortPlan sort, const __grid_constant__ GatherPlan plan, const __grid_constant__ Shape shape) {
  using A = Acc<T>;
  struct alignas(2 * sizeof(A)) Share {
    A share;
    int query;
  };
  __shared__ alignas(16) Share staged[kGatherBlock];
  const unsigned lanes = kLanes ? kLanes : shape.lanes;
  // Adjacent blocks write adjacent heads.
  int tile = int(blockIdx.x / unsigned(shape.heads));
  const int head = int(blockIdx.x) - tile * shape.heads;
  const int64_t batch = blockIdx.y;
  Tiling tiling;
  const int level_index = find_tile<kPlanned>(tile, tiling, levels, plan, shape);
  if (level_index < 0) return;
  const Level level = tiling.level;
  const int64_t batch_head = batch * shape.heads + head;
  ends += batch_head * sort.cells + tiling.first_cell;
  entries += (batch_head * shape.levels + level_index) * sort.points;

  const int split = 1 << tiling.log_split, tile_y = int(unsigned(tile) / unsigned(tiling.tiles_per_row));
  const unsigned lane = threadIdx.x % lanes, slot = threadIdx.x / lanes, pixel = slot >> tiling.log_split;
  const int part = slot & (split - 1);
  const int x = (tile - tile_y * tiling.tiles_per_row) * kTileWidth + int(pixel % kTileWidth);
  const int y = tile_y * tiling.tile_height + int(pixel / kTileWidth);
  const bool valid = x < level.width && y < level.height;

  // The cells to the left and right are adjacent in the sort order, above the pixel and below it: two runs of entries.
  int begin[2] = {0, 0}, middle[2] = {0, 0}, end[2] = {0, 0};
  if (valid) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int cell = (y + r) * (level.width + 1) + x;
      begin[r] = cell > 0 ? __ldg(ends + cell - 1) : 0;
      middle[r] = __ldg(ends + cell);
      end[r] = __ldg(ends + cell + 1);
    }
  }
  const int above = end[0] - begin[0], count = above + end[1] - begin[1];
  const uint32_t row = uint32_t(shape.heads * shape.channels) * sizeof(T);
  for (int channel = lane * V; channel - int(lane) * V < shape.channels; channel += lanes * V) {
    const bool has_channels = channel < shape.channels;
    const char* gradient = reinterpret_cast<const char*>(
        grad_output + (batch * shape.queries * shape.heads + head) * shape.channels + (has_channels ? channel : 0));
    A sums[V] = {};
    // Each lane computes the weight of one entry. Then all lanes of the group accumulate these entries, each lane for its
    // own channels.
    int own = (lane << tiling.log_split) + part;
    for (int first = part; __any_sync(kFullWarp, first < count); first += lanes << tiling.log_split) {
      if (first < count) {
        const int k = min(own, count - 1);  // past the end: the last entry again, with weight 0
        const int position = k < above ? begin[0] + k : begin[1] + k - above;
        const Entry<A> entry = entries[position];
        const bool right = position < (k < above ? middle[0] : middle[1]);  // the pixel is the right corner of the cell
        const A share = (right ? entry.fraction_x : A(1) - entry.fraction_x) *
                        (k < above ? entry.fraction_y : A(1) - entry.fraction_y) * entry.weight;
        staged[threadIdx.x] = {own < count ? share : A(0), entry.query};
      }
      own += lanes << tiling.log_split;
      __syncwarp();
      const Share* shares = staged + (threadIdx.x - lane);
      for (int j = 0; j < lanes && first + (j << tiling.log_split) < count; j += kBatch) {
        Share share[kBatch];
        Channels<T, V> channels[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) share[i] = shares[j + i];
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
          channels[i] = Channels<T, V>::load(gradient + uint64_t(uint32_t(share[i].query)) * row);
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
#pragma unroll
          for (int v = 0; v < V; ++v) sums[v] = fused_multiply_add(share[i].share, channels[i][v], sums[v]);
      }
      __syncwarp();
    }
    for (int step = lanes; step < lanes << tiling.log_split; step *= 2)
#pragma unroll
      for (int i = 0; i < V; ++i) sums[i] += __shfl_xor_sync(kFullWarp, sums[i], step);
    if (valid && part == 0 && has_channels) {
      const int64_t cell = batch * shape.cells + level.start + y * level.width + x;
      Channels<T, V>::store(grad_value + (cell * shape.heads + head) * shape.channels + channel, sums);
    }
  }
}

// ---- host side ----------------------------------------------------------------------------------------------------

// An upper bound if the sizes are in device memory: height * width <= S, so (height + 1) * (width + 1) <= 2 * S + 2. Every
// level may be that large, because nothing checks that they do not overlap.
int64_t bound_cells(const Sizes& sizes, const Levels& levels) {
  if (levels.hw == nullptr) return sizes.L * (2 * sizes.S + 2);
  int64_t cells = 0;
  for (int64_t l = 0; l < sizes.L; ++l) cells += grid_cells(levels.hw[2 * l], levels.hw[2 * l + 1]);
  return cells;
}

int64_t largest_level(const Sizes& sizes, const Levels& levels) {
  if (levels.hw == nullptr) return 2 * sizes.S + 2;
  int64_t most = 0;
  for (int64_t l = 0; l < sizes.L; ++l) most = max(most, grid_cells(levels.hw[2 * l], levels.hw[2 * l + 1]));
  return most;
}

struct Scratch {
  int64_t ends, entries, ordered, cell_of_entry, bytes;  // offsets, and the total
};

Scratch lay_out(const Sizes& sizes, const Levels& levels, bool deterministic) {
  const auto align = [](int64_t bytes) { return (bytes + 255) / 256 * 256; };
  const int64_t entry = sizes.dtype == DType::f64 ? sizeof(Entry<double>) : sizeof(Entry<float>);
  const int64_t num_points = sizes.B * sizes.H * sizes.L * sizes.Q * sizes.P;
  Scratch scratch;
  scratch.ends = 0;
  scratch.entries = align(sizes.B * sizes.H * bound_cells(sizes, levels) * int64_t(sizeof(int)));
  scratch.ordered = scratch.entries + align(num_points * entry);
  scratch.cell_of_entry = scratch.ordered + (deterministic ? align(num_points * entry) : 0);
  scratch.bytes = scratch.cell_of_entry + (deterministic ? align(num_points * int64_t(sizeof(int))) : 0);
  return scratch;
}

template <class T, int V, int kLanes>
const char* gather(const Backward& call, const Levels& levels, const SortPlan& plan, const Entry<Acc<T>>* entries,
                   const int* ends) {
  const Shape shape = make_shape(call.sizes, V);
  GatherPlan tiles{};
  const bool planned = levels.hw != nullptr;
  for (int64_t l = 0, cells = 0; planned && l < call.sizes.L; ++l) {
    const Level level{call.levels.height[l], call.levels.width[l], call.levels.start[l]};
    tiles.levels[l] = tile_level(shape, level, int(cells));
    tiles.tiles += tiles.levels[l].tiles;
    cells += grid_cells(level.height, level.width);
  }
  if (!planned) tiles.tiles = int(call.sizes.S);  // an upper bound: every tile has a pixel
  if (tiles.tiles * call.sizes.H > INT32_MAX) return "the value gradient is too large for one launch";
  if (!planned) {  // unchecked sizes may leave cells uncovered
    const size_t bytes = call.sizes.B * call.sizes.S * call.sizes.H * call.sizes.D * sizeof(T);
    if (const char* error = memory_error(cudaMemsetAsync(call.grad_value, 0, bytes, call.stream))) return error;
  }
  const auto kernel = planned ? gather_kernel<T, V, kLanes, true> : gather_kernel<T, V, 0, false>;
  for (int64_t first = 0; first < call.sizes.B; first += kMaxGridY) {
    const dim3 blocks(unsigned(tiles.tiles * call.sizes.H), unsigned(min(call.sizes.B - first, kMaxGridY)));
    const int64_t heads = first * call.sizes.H;  // of earlier launches
    kernel<<<blocks, kGatherBlock, 0, call.stream>>>(
        static_cast<const T*>(call.grad_output) + heads * call.sizes.Q * call.sizes.D, call.levels,
        entries + heads * call.sizes.L * plan.points, ends + heads * plan.cells,
        static_cast<T*>(call.grad_value) + heads * call.sizes.S * call.sizes.D, plan, tiles, shape);
  }
  return launch_error();
}

template <class T> const char* run(const Backward& call, const Levels& levels, bool deterministic) {
  using A = Acc<T>;
  const Shape shape = make_shape(call.sizes, 1);
  const Scratch scratch = lay_out(call.sizes, levels, deterministic);
  auto* ends = reinterpret_cast<int*>(call.scratch + scratch.ends);
  auto* entries = reinterpret_cast<Entry<A>*>(call.scratch + scratch.entries);
  auto* ordered = reinterpret_cast<Entry<A>*>(call.scratch + scratch.ordered);
  auto* cell_of_entry = deterministic ? reinterpret_cast<int*>(call.scratch + scratch.cell_of_entry) : nullptr;

  const int64_t groups = call.sizes.B * call.sizes.H * call.sizes.L, largest = largest_level(call.sizes, levels);
  SortPlan plan;
  plan.cells = bound_cells(call.sizes, levels);
  plan.points = call.sizes.Q * call.sizes.P;
  plan.bands = max(ceil_div(largest, kBandCells), ceil_div(kSortBlocks, groups));
  plan.band_cells = (ceil_div(largest, plan.bands) + 4) / 4 * 4;
  if (max(plan.cells, plan.points) > INT32_MAX || groups * max(int64_t(plan.bands), plan.points / 256 + 1) > INT32_MAX)
    return "too many cells or points for one launch";
  const auto sort = call.sizes.P == 4 ? sort_kernel<A, 4> : sort_kernel<A, 0>;
  int shared_bytes = plan.band_cells * int(sizeof(int)), device = 0, most = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  plan.staged = shared_bytes + plan.points * int64_t(sizeof(Entry<A>)) <= most - 1024;
  if (plan.staged) shared_bytes += int(plan.points) * int(sizeof(Entry<A>));
  const auto attribute = cudaFuncAttributeMaxDynamicSharedMemorySize;
  if (const char* error = memory_error(cudaFuncSetAttribute(sort, attribute, most - 1024))) return error;
  sort<<<int(groups * plan.bands), kSortBlock, shared_bytes, call.stream>>>(
      static_cast<const A*>(call.locations), static_cast<const A*>(call.weights), call.levels, entries, ends,
      cell_of_entry, plan, shape);
  if (const char* error = launch_error()) return error;
  if (deterministic) {
    const int blocks = ceil_div(plan.points, 256);
    order_kernel<A><<<int(groups * blocks), 256, 0, call.stream>>>(entries, ends, cell_of_entry, ordered, call.levels,
                                                                  plan, blocks, shape);
    if (const char* error = launch_error()) return error;
    entries = ordered;
  }
  if constexpr (sizeof(T) <= 4) {
    constexpr int V = 16 / sizeof(T);
    if (call.sizes.D == 32) return gather<T, V, 32 / V>(call, levels, plan, entries, ends);
    if (call.sizes.D == 16) return gather<T, 4, 4>(call, levels, plan, entries, ends);
    if (call.sizes.D % V == 0) return gather<T, V, 0>(call, levels, plan, entries, ends);
  }
  return gather<T, 1, 0>(call, levels, plan, entries, ends);
}

}  // namespace

int64_t sorted_scratch_bytes(const Sizes& sizes, const Levels& levels, bool deterministic) {
  return lay_out(sizes, levels, deterministic).bytes;
}

const char* sorted_value_gradient(const Backward& call, const Levels& levels, bool deterministic) {
  return with_type(call.sizes.dtype, [&](auto zero) { return run<decltype(zero)>(call, levels, deterministic); });
}

}  // namespace rtdetr::cuda
