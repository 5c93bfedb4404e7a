// Cost of matching every box of a batch with every query of its image, in all layers and groups. One block per box, layer
// and group; its threads loop over the queries. Formulas: losses/functional.py (focal_class_cost) and rtdetr/boxes.py.
#include "../matching_cost.h"

#include "common.cuh"
#include "spans.cuh"

namespace rtdetr::cuda {
namespace {

constexpr int kThreads = 128;
constexpr double kAlpha = 0.25, kFocalEps = 1e-8;

struct Launch {
  MatchingCost task;
  int starts[kMaxCostImages + 1];  // first row of each image; unused if every image has `slots` rows
};

template <class A>
__device__ A class_cost(A logit) {
  const A p = 1 / (1 + exp(-logit)), rest = 1 - p;
  const A negative = A(1 - kAlpha) * (p * p) * -log(rest + A(kFocalEps));
  const A positive = A(kAlpha) * (rest * rest) * -log(p + A(kFocalEps));
  return positive - negative;
}

template <class T>
__global__ void __launch_bounds__(kThreads) matching_cost_kernel(const __grid_constant__ Launch launch) {
  using A = Acc<T>;
  const MatchingCost& task = launch.task;
  const int64_t row = blockIdx.x, set = blockIdx.y, layer = set / task.groups, group = set % task.groups;
  int64_t image, slot;
  if (task.counts) {
    int first = 0, end = static_cast<int>(task.images);  // the image is one of first, ..., end - 1
    while (end - first > 1) {
      const int middle = (first + end) / 2;
      (launch.starts[middle] <= row ? first : end) = middle;
    }
    image = first, slot = row - launch.starts[first];
  } else {
    image = row / task.slots, slot = row % task.slots;
  }
  const auto* ls = task.logit_strides;
  const auto* bs = task.box_strides;
  const int64_t target = image * task.slots + slot, label = task.labels[target];
  const bool known = 0 <= label && label < task.classes;  // else the cost is NaN, so that the solver reports the image
  const T* logits = static_cast<const T*>(task.logits) + layer * ls[0] + group * ls[1] + image * ls[2] + label * ls[4];
  const A* boxes = static_cast<const A*>(task.boxes) + layer * bs[0] + group * bs[1] + image * bs[2];
  const A* wanted = static_cast<const A*>(task.targets) + 4 * target;
  const A cx = wanted[0], cy = wanted[1], w = wanted[2], h = wanted[3];
  const Span<A> wanted_x = span(cx, w), wanted_y = span(cy, h);
  const A wanted_area = area(wanted_x, wanted_y);
  A* cost = static_cast<A*>(task.cost) + (set * task.rows + row) * task.queries;
  for (int64_t query = threadIdx.x; query < task.queries; query += kThreads) {
    const A* box = boxes + query * bs[3];
    const A bx = box[0], by = box[bs[4]], bw = box[2 * bs[4]], bh = box[3 * bs[4]];
    const A l1 = fabs(bx - cx) + fabs(by - cy) + fabs(bw - w) + fabs(bh - h);
    const Span<A> box_x = span(bx, bw), box_y = span(by, bh);
    const Pair<A> x = pair(box_x, wanted_x), y = pair(box_y, wanted_y);
    const A shared = positive(x.shared) * positive(y.shared);
    const A all = area(box_x, box_y) + wanted_area - shared + A(kGiouEps), hull = x.hull * y.hull + A(kGiouEps);
    const A overlap = shared / all - (hull - all) / hull;
    const A focal = known ? class_cost<A>(widen(logits[query * ls[3]])) : A(NAN);
    cost[query] = A(task.class_weight) * focal + A(task.l1_weight) * l1 - A(task.giou_weight) * overlap;
  }
}

}  // namespace

const char* matching_cost(const MatchingCost& task, void* stream) {
  Launch launch{task};
  for (int64_t b = 0; task.counts && b < task.images; ++b)
    launch.starts[b + 1] = launch.starts[b] + static_cast<int>(task.counts[b]);
  const auto run = task.type == DType::f64   ? matching_cost_kernel<double>
                   : task.type == DType::f16 ? matching_cost_kernel<__half>
                   : task.type == DType::bf16 ? matching_cost_kernel<__nv_bfloat16>
                                              : matching_cost_kernel<float>;
  const dim3 blocks(static_cast<unsigned>(task.rows), static_cast<unsigned>(task.layers * task.groups));
  run<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(launch);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace rtdetr::cuda
