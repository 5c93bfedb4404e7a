// Interface between the operators (ms_deform_attn.cpp: tensors, checks, registration) and their kernels
// (cpu/, cuda/: pointers and sizes only). The kernels include no torch header.
//
//   B batch, S cells of all levels, H heads, D channels per head, Q queries, L levels, P points per level.
//   value (B, S, H, D), locations (B, Q, H, L, P, 2) x before y in [0, 1], weights (B, Q, H, L, P), output (B, Q, H * D);
//   everything contiguous. value, output and their gradients have the type `dtype`; locations, weights and their
//   gradients are float (double when dtype is f64).
#pragma once

#include <cstdint>

namespace rtdetr {

enum class DType : int { f32 = 0, f64 = 1, f16 = 2, bf16 = 3 };

struct Sizes {
  DType dtype;
  int64_t B, S, H, D, Q, L, P;
};

// Map sizes. If known on the host: hw, L pairs (height, width), checked; level starts follow from them. Else hw is null, and
// shapes and starts are in the memory of the device that runs the kernel, unchecked. Exactly one of the two is given.
struct Levels {
  const int64_t* hw = nullptr;
  const int64_t* device_shapes = nullptr;  // (L, 2)
  const int64_t* device_starts = nullptr;  // (L,)
};

namespace cuda {

// Bytes of scratch that backward() needs: device memory, aligned to 16 bytes. 0 if its algorithm needs none. None is needed
// without a gradient of value.
int64_t backward_scratch_bytes(const Sizes& sizes, const Levels& levels, bool deterministic);

// Launchers return nullptr, or an error message (static storage). They never synchronise. Pointers must be aligned to
// 16 bytes, as those of newly allocated tensors are.
const char* forward(const Sizes& sizes, const Levels& levels, const void* value, const void* locations, const void* weights,
                    void* output, void* stream);

// A null gradient pointer means "not needed". Every gradient is fully written; the caller need not zero it.
const char* backward(const Sizes& sizes, const Levels& levels, const void* grad_output, const void* value,
                     const void* locations, const void* weights, void* grad_value, void* grad_locations,
                     void* grad_weights, void* scratch, bool deterministic, void* stream);

// Inputs of the fused call. reference (B, Q, R, C) float, R = 1 (shared by all levels) or L, C = 2 (points) or 4 (boxes
// cxcywh). offsets (B, Q, H, L, P, 2) and logits (B, Q, H, L, P) in `dtype`: the raw outputs of the module's two linear
// layers.
//   C = 4: location = xy + offset / P * wh * offset_scale;   C = 2: location = xy + offset / (width, height) of the level.
//   weights = softmax of the logits over L * P.
struct Fused {
  const void* reference;
  int64_t reference_levels, reference_channels;
  double offset_scale;
  const void* offsets;
  const void* logits;
};

const char* fused_forward(const Sizes& sizes, const Levels& levels, const void* value, const Fused& fused, void* output,
                          void* stream);

// As backward(). The gradient of reference is float, those of offsets and logits have type `dtype`.
int64_t fused_backward_scratch_bytes(const Sizes& sizes, const Levels& levels, bool deterministic);
const char* fused_backward(const Sizes& sizes, const Levels& levels, const void* grad_output, const void* value,
                           const Fused& fused, void* grad_value, void* grad_reference, void* grad_offsets,
                           void* grad_logits, void* scratch, bool deterministic, void* stream);

}  // namespace cuda

namespace cpu {

// Runs body(begin, end, context) over [0, count) on torch's threads, in chunks of at least `grain`.
using ParallelFor = void (*)(int64_t count, int64_t grain, void (*body)(int64_t, int64_t, void*), void* context);

// As above; map sizes are always on the host (hw). Both are deterministic for any number of threads.
const char* forward(const Sizes& sizes, const Levels& levels, const void* value, const void* locations, const void* weights,
                    void* output, ParallelFor parallel_for);
const char* backward(const Sizes& sizes, const Levels& levels, const void* grad_output, const void* value,
                     const void* locations, const void* weights, void* grad_value, void* grad_locations,
                     void* grad_weights, ParallelFor parallel_for);

}  // namespace cpu

}  // namespace rtdetr
