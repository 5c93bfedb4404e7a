// Two sources of an item's locations and weights: given, or computed from reference, offsets and logits.
#pragma once

#include <cmath>

#include "common.cuh"

namespace rtdetr::cuda {

template <class A> struct Sample {
  A x, y, weight;
};

// Points of the plain call: locations and weights in memory.
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
  __device__ __forceinline__ Sample<Acc<T>> sample(const Source& item, int point, int, const Level&) const {
    const Two<Acc<T>> location = load_two(item.location + 2 * point);
    return {location.x, location.y, __ldg(item.weight + point)};
  }
};

// Points of the fused call: reference, raw offsets, logits. The lanes of an item compute its softmax together.
template <class T> struct FusedPoints {
  using A = Acc<T>;
  const A* reference;
  const T* offsets;
  const T* logits;
  int reference_levels, reference_channels;
  A box_scale;  // offset_scale / P

  FusedPoints(const Sizes& sizes, const Fused& fused)
      : reference(static_cast<const A*>(fused.reference)),
        offsets(static_cast<const T*>(fused.offsets)),
        logits(static_cast<const T*>(fused.logits)),
        reference_levels(int(fused.reference_levels)),
        reference_channels(int(fused.reference_channels)),
        box_scale(A(fused.offset_scale / double(sizes.P))) {}

  struct Source {
    int64_t query;
    const T* offset;
    const T* logit;
    A maximum, inverse_sum;
  };

  __device__ __forceinline__ Source item(int64_t index, int lane, int lanes, const Shape& shape) const {
    Source item;
    item.query = divide(index, shape.heads, shape.num_items);
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

  // Change of the location per unit of offset.
  __device__ __forceinline__ Two<A> step(const A* box, const Level& level) const {
    if (reference_channels == 4) return {box[2] * box_scale, box[3] * box_scale};
    return {A(1) / A(level.width), A(1) / A(level.height)};
  }
  __device__ __forceinline__ const A* box(int64_t query, int level_index) const {
    return reference + (query * reference_levels + (reference_levels > 1 ? level_index : 0)) * reference_channels;
  }

  __device__ __forceinline__ Sample<A> sample(const Source& item, int point, int level_index, const Level& level) const {
    const A* at = box(item.query, level_index);
    const Two<A> by = step(at, level);
    const A weight = exp(widen(item.logit[point]) - item.maximum) * item.inverse_sum;
    return {at[0] + widen(item.offset[2 * point]) * by.x, at[1] + widen(item.offset[2 * point + 1]) * by.y, weight};
  }
};

}  // namespace rtdetr::cuda
