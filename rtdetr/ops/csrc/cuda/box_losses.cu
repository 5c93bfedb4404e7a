// L1, 1 - GIoU and IoU of matched boxes, with the gradients of the first two. One thread per query. Formulas, and the
// subgradients at ties, are those of rtdetr/boxes.py under torch's autograd.
#include "../box_losses.h"

#include <cuda_runtime.h>

#include "spans.cuh"

namespace rtdetr::cuda {
namespace {

constexpr int kThreads = 128;
constexpr float kIouEps = 1e-9f;

__device__ float larger(float a, float b) { return a > b ? 1 : a == b ? 0.5f : 0; }  // derivative of max(a, b) by a
__device__ float sign(float x) { return static_cast<float>(x > 0) - static_cast<float>(x < 0); }

// Gradient by the centre and size of span a, from those by its overlap and hull with b and by its size.
__device__ float2 to_box(Span<float> a, Span<float> b, float by_shared, float by_hull, float by_size) {
  const float high = by_shared * larger(b.high, a.high) + by_hull * larger(a.high, b.high) + by_size;
  const float low = -by_shared * larger(a.low, b.low) - by_hull * larger(b.low, a.low) - by_size;
  return {low + high, 0.5f * (high - low)};
}

__global__ void __launch_bounds__(kThreads) box_losses_kernel(BoxLosses task) {
  const int64_t query = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (query >= task.queries) return;
  float4 by_l1{}, by_overlap{};
  float l1 = 0, overlap = 0, score = 0;
  const int64_t slot = task.index[query];
  if (slot >= 0) {
    const float* own = task.boxes;
    int64_t left = query / task.sizes[kBoxAxes - 1];
    const int64_t image = left % task.sizes[kBoxAxes - 2];
    left = query;
    for (int axis = kBoxAxes - 1; axis >= 0; --axis) {
      own += left % task.sizes[axis] * task.strides[axis];
      left /= task.sizes[axis];
    }
    const float4 a{own[0], own[1], own[2], own[3]};
    const float4 b = reinterpret_cast<const float4*>(task.targets)[image * task.slots + slot];
    by_l1 = {sign(a.x - b.x), sign(a.y - b.y), sign(a.z - b.z), sign(a.w - b.w)};
    l1 = fabsf(a.x - b.x) + fabsf(a.y - b.y) + fabsf(a.z - b.z) + fabsf(a.w - b.w);
    const Span<float> ax = span(a.x, a.z), ay = span(a.y, a.w), bx = span(b.x, b.z), by = span(b.y, b.w);
    const Pair<float> x = pair(ax, bx), y = pair(ay, by);
    const float width = ax.high - ax.low, height = ay.high - ay.low, wide = positive(x.shared), tall = positive(y.shared);
    const float shared = wide * tall;
    const float areas = area(ax, ay) + area(bx, by);
    const float all = areas - shared + float(kGiouEps), hull = x.hull * y.hull + float(kGiouEps);
    score = shared / (areas - shared + kIouEps);
    overlap = 1 - (shared / all - (hull - all) / hull);
    const float by_all = -(1 / hull - shared / (all * all)), by_hull = all / (hull * hull), by_shared = -1 / all - by_all;
    const float by_wide = x.shared >= 0 ? by_shared * tall : 0, by_tall = y.shared >= 0 ? by_shared * wide : 0;
    const float by_width = width >= 0 ? by_all * positive(height) : 0, by_height = height >= 0 ? by_all * positive(width) : 0;
    const float2 first = to_box(ax, bx, by_wide, by_hull * y.hull, by_width);
    const float2 second = to_box(ay, by, by_tall, by_hull * x.hull, by_height);
    by_overlap = {first.x, second.x, first.y, second.y};
  }
  task.l1[query] = l1, task.overlap[query] = overlap, task.scores[query] = score;
  reinterpret_cast<float4*>(task.by_l1)[query] = by_l1;
  reinterpret_cast<float4*>(task.by_overlap)[query] = by_overlap;
}

}  // namespace

const char* box_losses(const BoxLosses& task, void* stream) {
  const auto blocks = static_cast<unsigned>((task.queries + kThreads - 1) / kThreads);
  box_losses_kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(task);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace rtdetr::cuda
