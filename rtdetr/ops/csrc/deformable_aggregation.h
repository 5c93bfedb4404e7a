// The border between the dispatcher (deformable_aggregation.cpp) and the CUDA kernels, as in ms_deform_attn.h.
//
//   B batch, S cells of all maps, C channels, A anchors, P points per anchor, N cameras, L levels, G groups of C / G channels.
//   features (B, S, C), locations (B, A, P, N, 2) x before y, weights (B, A, P, N, L, G), output (B, A, C); everything
//   contiguous. features, output and their gradients have the type `dtype`, the others float (double when dtype is f64).
//   A point with x or y <= 0 or >= 1 counts for nothing in that camera.
#pragma once

#include "ms_deform_attn.h"

namespace rtdetr {

struct AggregationSizes {
  DType dtype;
  int64_t B, S, C, A, P, N, L, G;
};

namespace cuda {

// Levels holds N * L maps, camera after camera.
const char* aggregate(const AggregationSizes& sizes, const Levels& levels, const void* features, const void* locations,
                      const void* weights, void* output, void* stream);

// As backward() of ms_deform_attn.h. The sum of many points is float, which 16-bit features need as scratch.
int64_t aggregate_backward_scratch_bytes(const AggregationSizes& sizes);
const char* aggregate_backward(const AggregationSizes& sizes, const Levels& levels, const void* grad_output,
                               const void* features, const void* locations, const void* weights, void* grad_features,
                               void* grad_locations, void* grad_weights, void* scratch, void* stream);

}  // namespace cuda
}  // namespace rtdetr
