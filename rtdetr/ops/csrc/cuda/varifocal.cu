// Varifocal loss of matched queries with its gradient, in one pass. One warp per row of classes.
#include "../varifocal.h"

#include <cuda_runtime.h>

namespace rtdetr::cuda {
namespace {

constexpr int kWarp = 32, kRows = 8;  // rows per block
constexpr float kMostEntropy = 100, kLinear = 40;

struct Entropy {
  float value, slope;
};

// -log(rest) and its derivative by x, where p = sigmoid(x) and rest = 1 - p. NaN propagates.
__device__ Entropy entropy(float x, float p, float rest, bool bounded) {
  if (!bounded) return {x > kLinear ? x : log1pf(expf(x)), p};
  const float value = -logf(rest);
  return value >= kMostEntropy ? Entropy{kMostEntropy, 0} : Entropy{value, p};
}

__global__ void __launch_bounds__(kWarp* kRows) varifocal_kernel(Varifocal task) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.y;
  if (row >= task.rows) return;
  const float* logits = task.logits;
  int64_t left = row;
  for (int axis = kVarifocalAxes - 1; axis >= 0; --axis) {
    logits += left % task.sizes[axis] * task.strides[axis];
    left /= task.sizes[axis];
  }
  const int64_t label = task.matched[row] ? task.labels[row] : -1;
  const float score = task.scores[row];
  float sum = 0;
  for (int64_t i = threadIdx.x; i < task.classes; i += kWarp) {
    const float x = logits[i], p = 1 / (1 + expf(-x)), rest = 1 - p;
    const Entropy miss = entropy(x, p, rest, task.bounded);
    const float weight = task.alpha * (p * p);
    float loss = miss.value * weight, slope = (2 * rest * miss.value + miss.slope) * weight;
    if (i == label) {
      const Entropy found = entropy(-x, rest, p, task.bounded);
      loss = score * (score * found.value + (1 - score) * miss.value);
      slope = score * ((1 - score) * miss.slope - score * found.slope);
    }
    task.gradient[row * task.classes + i] = slope;
    sum += loss;
  }
  for (int step = kWarp / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
  if (threadIdx.x == 0) task.losses[row] = sum;
}

}  // namespace

const char* varifocal(const Varifocal& task, void* stream) {
  const auto blocks = static_cast<unsigned>((task.rows + kRows - 1) / kRows);
  varifocal_kernel<<<blocks, dim3(kWarp, kRows), 0, static_cast<cudaStream_t>(stream)>>>(task);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace rtdetr::cuda
