// Shared by forward and backward: channel vectors, map sizes, and the cells around a point.
//
// Threads: `lanes` adjacent lanes (a power of two, 4 to 32) own one item, that is one (batch, query, head). Each lane
// owns V channels, 16 bytes if D allows, and loops over the rest if D is larger. Before a warp gathers cells, its lanes
// write the quantities of each point to shared memory, so that they are not computed again for every channel.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>

#include "../ms_deform_attn.h"

#ifdef RTDETR_DEBUG
#define RTDETR_ASSERT(condition)                                                 \
  do {                                                                           \
    if (!(condition)) {                                                          \
      printf("%s:%d: violated: %s\n", __FILE__, __LINE__, #condition);           \
      __trap();                                                                  \
    }                                                                            \
  } while (0)
#else
#define RTDETR_ASSERT(condition) ((void)0)
#endif

namespace rtdetr::cuda {

constexpr unsigned kFullWarp = 0xffffffffu;
constexpr int kMaxHostLevels = 32;

// Limits of a multiprocessor. Launch bounds that exceed them are ignored, with a warning.
#if __CUDA_ARCH__ == 750
constexpr int kMaxThreads = 1024, kMaxBlocks = 16;
#elif __CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 870
constexpr int kMaxThreads = 1536, kMaxBlocks = 16;
#elif __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200
constexpr int kMaxThreads = 1536, kMaxBlocks = 24;
#else
constexpr int kMaxThreads = 2048, kMaxBlocks = 32;
#endif
constexpr int at_most(int a, int b) { return a < b ? a : b; }
template <int kBlocks, int kThreads>
constexpr int kResident = at_most(kBlocks, at_most(kMaxBlocks, kMaxThreads / kThreads));

// ---- numbers ------------------------------------------------------------------------------------------------------

// Locations, weights and accumulators are float, or double for double values.
template <class T> struct AccumulatorOf { using type = float; };
template <> struct AccumulatorOf<double> { using type = double; };
template <class T> using Acc = typename AccumulatorOf<T>::type;

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ double widen(double x) { return x; }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T> __device__ __forceinline__ T narrow(Acc<T> x) { return static_cast<T>(x); }
template <> __device__ __forceinline__ __half narrow<__half>(float x) { return __float2half_rn(x); }
template <> __device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }

__device__ __forceinline__ float fused_multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
__device__ __forceinline__ double fused_multiply_add(double a, double b, double c) { return fma(a, b, c); }

// Rounds twice on purpose: a fused multiply-add would put a point that lies exactly on a cell border into the cell
// before it, with a different location gradient than the official kernel and the PyTorch reference.
__device__ __forceinline__ float pixel_coordinate(float x, int size) { return __fadd_rn(__fmul_rn(x, size), -0.5f); }
__device__ __forceinline__ double pixel_coordinate(double x, int size) { return __dadd_rn(__dmul_rn(x, size), -0.5); }

// ---- vectors of channels ------------------------------------------------------------------------------------------

template <int bytes> struct RawOf;
template <> struct RawOf<16> { using type = uint4; };
template <> struct RawOf<8> { using type = uint2; };
template <> struct RawOf<4> { using type = uint32_t; };
template <> struct RawOf<2> { using type = uint16_t; };

// V channels in their storage type: one load, one store; converted to Acc<T> on use.
template <class T, int V> struct Channels {
  using Raw = typename RawOf<int(sizeof(T)) * V>::type;
  Raw raw;

  static __device__ __forceinline__ Channels load(const void* address) {
    return {__ldg(static_cast<const Raw*>(address))};
  }
  static __device__ __forceinline__ void store(void* address, const Acc<T> (&sums)[V]) {
    Raw raw;
#pragma unroll
    for (int i = 0; i < V; ++i) reinterpret_cast<T*>(&raw)[i] = narrow<T>(sums[i]);
    __stcs(static_cast<Raw*>(address), raw);
  }
  __device__ __forceinline__ Acc<T> operator[](int i) const { return widen(reinterpret_cast<const T*>(&raw)[i]); }
};

// Two adjacent numbers, in one store.
template <class T> __device__ __forceinline__ void store_pair(T* address, Acc<T> x, Acc<T> y) {
  struct alignas(2 * sizeof(T)) Pair { T x, y; };
  *reinterpret_cast<Pair*>(address) = {narrow<T>(x), narrow<T>(y)};
}

template <class A> struct alignas(16) Four { A x, y, z, w; };
template <class A> struct alignas(2 * sizeof(A)) Two { A x, y; };

// An (x, y) pair, in one load.
__device__ __forceinline__ Two<float> load_two(const float* address) {
  const float2 pair = __ldg(reinterpret_cast<const float2*>(address));
  return {pair.x, pair.y};
}
__device__ __forceinline__ Two<double> load_two(const double* address) {
  const double2 pair = __ldg(reinterpret_cast<const double2*>(address));
  return {pair.x, pair.y};
}
__device__ __forceinline__ void store_two(float* address, float x, float y) {
  __stcs(reinterpret_cast<float2*>(address), make_float2(x, y));
}
__device__ __forceinline__ void store_two(double* address, double x, double y) {
  __stcs(reinterpret_cast<double2*>(address), make_double2(x, y));
}

// ---- sizes --------------------------------------------------------------------------------------------------------

struct Level {
  int height, width, start;
};

// Map sizes as a kernel argument, or pointers to them. Sizes in device memory are unchecked: a level that does not lie
// within the cells of value is treated as 0 x 0.
struct LevelTable {
  int height[kMaxHostLevels], width[kMaxHostLevels], start[kMaxHostLevels];
  const int64_t* device_shapes;
  const int64_t* device_starts;
  int cells;

  __device__ __forceinline__ Level operator[](int level) const {
    if (device_shapes == nullptr) return {height[level], width[level], start[level]};
    const int h = to_int(device_shapes[2 * level]), w = to_int(device_shapes[2 * level + 1]);
    const int first = to_int(device_starts[level]);
    const bool fits = h > 0 && w > 0 && first >= 0 && int64_t(h) * w <= int64_t(cells) - first;
    return {fits ? h : 0, fits ? w : 0, first};
  }
  // -1 if x does not fit 32 bits: 64-bit comparisons need registers that the backward kernels do not have.
  static __device__ __forceinline__ int to_int(int64_t x) { return int(x) == x ? int(x) : -1; }
};

// The sizes in the form that kernels use. Cells, queries and heads fit 32 bits; items and element offsets may not.
struct Shape {
  int64_t num_items;  // B * Q * H
  int cells, heads, channels, queries, levels, points;
  int level_points;         // levels * points
  int lanes;                // lanes per item
  float inverse_points;     // 1 / points

  bool head_major;          // blocks take items head by head
  // Exact for every index below 2^20, and cheaper than a division.
  __device__ __forceinline__ int level_of(int point) const { return int((float(point) + 0.5f) * inverse_points); }
};

// floor(a / b), in 32 bits if a, b <= limit fit.
__device__ __forceinline__ int64_t divide(int64_t a, int64_t b, int64_t limit) {
  return limit <= INT32_MAX ? int64_t(uint32_t(a) / uint32_t(b)) : a / b;
}

// The item at position `order` of the launch: its index in memory, its batch and its head. In memory, the heads of a
// query are adjacent. With many queries, blocks take the items of one head (head_major): its coarse maps then fit L1.
struct Item {
  int64_t index, batch;
  int head;
};

__device__ __forceinline__ Item find_item(int64_t order, const Shape& shape) {
  if (shape.head_major) {
    const int64_t map = divide(order, shape.queries, shape.num_items);
    const int64_t batch = divide(map, shape.heads, shape.num_items);
    const int head = int(map - batch * shape.heads);
    return {(batch * shape.queries + order - map * shape.queries) * shape.heads + head, batch, head};
  }
  const int64_t query = divide(order, shape.heads, shape.num_items);
  return {order, divide(query, shape.queries, shape.num_items), int(order - query * shape.heads)};
}

inline __host__ __device__ int ceil_div(int64_t a, int64_t b) { return int((a + b - 1) / b); }

// ---- cells around a point -----------------------------------------------------------------------------------------

// The cell whose corners (x, y) .. (x + 1, y + 1) surround a point: -1 <= x < width, so corners may lie outside the map.
// A point that touches no pixel is not `inside`. Its fractions are 0, or NaN if a coordinate is NaN or the map is 0 x 0.
template <class A> struct Cell {
  int x, y;
  A fraction_x, fraction_y;
  bool inside;
};

template <class A> __device__ __forceinline__ Cell<A> locate(A location_x, A location_y, const Level& level) {
  const A x = pixel_coordinate(location_x, level.width), y = pixel_coordinate(location_y, level.height);
  const A floor_x = floor(x), floor_y = floor(y);
  Cell<A> cell;
  cell.inside = x >= A(-1) && y >= A(-1) && x < A(level.width) && y < A(level.height);
  cell.inside = cell.inside && level.width > 0;
  const A outside = (x != x || y != y || level.width == 0) ? A(NAN) : A(0);
  cell.x = cell.inside ? int(floor_x) : 0;
  cell.y = cell.inside ? int(floor_y) : 0;
  cell.fraction_x = cell.inside ? x - floor_x : outside;
  cell.fraction_y = cell.inside ? y - floor_y : outside;
  return cell;
}

// Indices into value's S of the four corners, in the order (x, y), (x+1, y), (x, y+1), (x+1, y+1). A corner outside the
// map is replaced by its neighbour inside, so that it can be read; corner_mask tells which corners are inside.
template <class A>
__device__ __forceinline__ int4 corner_cells(const Cell<A>& cell, const Level& level, const Shape& shape) {
  if (!cell.inside) return make_int4(-1, 0, 0, 0);
  const int left = max(cell.x, 0), right = min(cell.x + 1, level.width - 1);
  const int top = level.start + max(cell.y, 0) * level.width;
  const int bottom = level.start + min(cell.y + 1, level.height - 1) * level.width;
  RTDETR_ASSERT(top + left >= 0 && bottom + right < shape.cells);
  return make_int4(top + left, top + right, bottom + left, bottom + right);
}

template <class A> __device__ __forceinline__ int corner_mask(const Cell<A>& cell, const Level& level) {
  const bool left = cell.x >= 0, right = cell.x + 1 < level.width;
  const bool top = cell.y >= 0, bottom = cell.y + 1 < level.height;
  if (!cell.inside) return 0;
  return int(top && left) | int(top && right) << 1 | int(bottom && left) << 2 | int(bottom && right) << 3;
}

// ---- host side ----------------------------------------------------------------------------------------------------

inline const char* launch_error() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

inline const char* memory_error(cudaError_t error) {
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// Calls function(T{}) with the type T of `dtype`.
template <class Function> const char* with_type(DType dtype, const Function& function) {
  switch (dtype) {
    case DType::f32: return function(float{});
    case DType::f64: return function(double{});
    case DType::f16: return function(__half{});
    case DType::bf16: return function(__nv_bfloat16{});
  }
  return "unknown dtype";
}

inline size_t element_size(DType dtype) { return dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2; }

inline Shape make_shape(const Sizes& sizes, int width) {
  Shape shape;
  shape.num_items = sizes.B * sizes.Q * sizes.H;
  shape.cells = int(sizes.S);
  shape.heads = int(sizes.H);
  shape.channels = int(sizes.D);
  shape.queries = int(sizes.Q);
  shape.levels = int(sizes.L);
  shape.points = int(sizes.P);
  shape.level_points = int(sizes.L * sizes.P);
  shape.inverse_points = 1.0f / float(sizes.P);
  shape.head_major = sizes.Q >= 500 && sizes.D * element_size(sizes.dtype) >= 128;
  shape.lanes = 4;
  while (shape.lanes < 32 && shape.lanes * width < sizes.D) shape.lanes *= 2;
  return shape;
}

inline const char* check_sizes(const Sizes& sizes, const Levels& levels) {
  if (sizes.S > INT32_MAX || sizes.Q > INT32_MAX || sizes.H * sizes.D > INT32_MAX / 8)
    return "cells, queries and H * D * 8 must each be below 2^31";
  if (sizes.L * sizes.P >= 1 << 20) return "L * P must be below 2^20";
  if (sizes.H * sizes.L * sizes.P > INT32_MAX) return "H * L * P must be below 2^31";
  if (sizes.B * sizes.Q * sizes.H > int64_t(1) << 36) return "B * Q * H must be at most 2^36";
  if (levels.hw != nullptr && sizes.L > kMaxHostLevels)
    return "more than 32 levels need their sizes in device memory";
  return nullptr;
}

inline LevelTable make_levels(const Sizes& sizes, const Levels& levels) {
  LevelTable table{};
  table.device_shapes = levels.hw == nullptr ? levels.device_shapes : nullptr;
  table.device_starts = levels.hw == nullptr ? levels.device_starts : nullptr;
  table.cells = int(sizes.S);
  for (int64_t l = 0, start = 0; levels.hw != nullptr && l < sizes.L; ++l) {
    table.height[l] = int(levels.hw[2 * l]);
    table.width[l] = int(levels.hw[2 * l + 1]);
    table.start[l] = int(start);
    start += levels.hw[2 * l] * levels.hw[2 * l + 1];
  }
  return table;
}

}  // namespace rtdetr::cuda
