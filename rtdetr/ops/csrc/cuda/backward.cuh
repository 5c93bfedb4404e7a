// The parts of backward, called by backward() in backward.cu.
#pragma once

#include "common.cuh"

namespace rtdetr::cuda {

// A point in the form that pixels gather: position in its cell, weight, and the query whose gradient it propagates.
template <class A> struct alignas(16) Entry {
  A fraction_x, fraction_y, weight;
  int query;
};

// Calls visit(query, weight, Cell) for this thread's share of the points of a (batch, head, level), in a block of kBlock
// threads. `first` is the index of the first point. The loads of kBatch points are in flight together. weights may be
// null. kPoints is P (0: shape.points).
template <int kBlock, int kBatch, int kPoints, class A, class Visit>
__device__ __forceinline__ void for_each_point(const A* locations, const A* weights, const Level& level,
                                               const Shape& shape, int64_t first, const Visit& visit) {
  const uint32_t points = kPoints ? kPoints : shape.points, count = points * shape.queries;
  const uint32_t stride = uint32_t(shape.heads) * shape.level_points;
  for (uint32_t begin = threadIdx.x; begin < count; begin += kBlock * kBatch) {
    uint32_t query[kBatch];
    Two<A> location[kBatch];
    A weight[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {  // issues all loads before the first visit
      const uint32_t i = begin + j * kBlock;
      query[j] = i / points;
      const int64_t index = first + uint64_t(query[j]) * stride + (i - query[j] * points);
      location[j] = i < count ? load_two(locations + 2 * index) : Two<A>{A(-4), A(-4)};  // outside
      weight[j] = weights != nullptr && i < count ? __ldg(weights + index) : A(0);
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) visit(int(query[j]), weight[j], locate(location[j].x, location[j].y, level));
  }
}

struct Backward {
  Sizes sizes;
  LevelTable levels;
  const void* grad_output;
  const void* value;
  const void* locations;
  const void* weights;
  void* grad_value;  // this and the next two: null if not needed
  void* grad_locations;
  void* grad_weights;
  char* scratch;
  cudaStream_t stream;
};

// Gradients of locations and weights. With reduce_value also that of value, accumulated by atomic reductions in float
// (double for double): in place or, for 16-bit values, in the scratch buffer, which is then cast.
int64_t reduction_scratch_bytes(const Sizes& sizes);
const char* point_gradients(const Backward& call, bool reduce_value);

// Gradient of 16-bit values, gathered by tiles of pixels, if the points of a level fit shared memory.
bool tiles_fit(const Sizes& sizes);
const char* tiled_value_gradient(const Backward& call, const Levels& levels);

// Gradient of value without float atomics: points are sorted by cell, then every pixel gathers from its four cells.
int64_t sorted_scratch_bytes(const Sizes& sizes, const Levels& levels, bool deterministic);
const char* sorted_value_gradient(const Backward& call, const Levels& levels, bool deterministic);

}  // namespace rtdetr::cuda
