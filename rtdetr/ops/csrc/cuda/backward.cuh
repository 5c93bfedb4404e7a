// The parts of backward, called in order by backward() in backward.cu.
#pragma once

#include "common.cuh"

namespace rtdetr::cuda {

struct Backward {
  Sizes sizes;
  LevelTable levels;
  const void* grad_output;
  const void* value;
  const void* locations;
  const void* weights;
  void* grad_value;  // null: not needed; so for the next two
  void* grad_locations;
  void* grad_weights;
  char* scratch;
  cudaStream_t stream;
};

// Gradients of locations and weights; with reduce_value also that of value, added up by atomic reductions in
// float (double for double): in place, or for 16-bit values in the scratch, which is then cast.
int64_t reduction_scratch_bytes(const Sizes& sizes);
const char* point_gradients(const Backward& call, bool reduce_value);

// Gradient of 16-bit values by tiles of pixels that look for their points, if that is the fastest.
bool tiles_are_faster(const Sizes& sizes, const Levels& levels);
const char* tiled_value_gradient(const Backward& call, const Levels& levels);

// Gradient of value without atomics on floats: points sorted by cell, then every pixel gathers from its four cells.
int64_t sorted_scratch_bytes(const Sizes& sizes, const Levels& levels, bool deterministic);
const char* sorted_value_gradient(const Backward& call, const Levels& levels, bool deterministic);

}  // namespace rtdetr::cuda
