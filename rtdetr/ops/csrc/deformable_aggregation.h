// Interface between the operators (deformable_aggregation.cpp) and their CUDA kernels; see ms_deform_attn.h.
//
//   B batch, S cells of all maps, C channels, A anchors, P points per anchor, N cameras, L levels, G groups of C / G channels.
//   features (B, S, C), locations (B, A, P, N, 2) x before y, weights (B, A, P, N, L, G), output (B, A, C); everything
//   contiguous. features, output and their gradients have the type `dtype`, the others float (double when dtype is f64).
//   A point with x or y <= 0 or >= 1 contributes nothing in that camera.
#pragma once

#include "ms_deform_attn.h"

namespace rtdetr {

struct AggregationSizes {
  DType dtype;
  int64_t B, S, C, A, P, N, L, G;
};

namespace cuda {

// `levels` holds N * L maps: all levels of the first camera, then of the next one.
const char* aggregate(const AggregationSizes& sizes, const Levels& levels, const void* features, const void* locations,
                      const void* weights, void* output, void* stream);

// As backward() of ms_deform_attn.h. The gradient of features is accumulated in float: 16-bit features need scratch for it.
int64_t aggregate_backward_scratch_bytes(const AggregationSizes& sizes);
const char* aggregate_backward(const AggregationSizes& sizes, const Levels& levels, const void* grad_output,
                               const void* features, const void* locations, const void* weights, void* grad_features,
                               void* grad_locations, void* grad_weights, void* scratch, void* stream);

}  // namespace cuda
}  // namespace rtdetr
