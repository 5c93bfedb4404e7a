// Sums over the rows of a gradient, which are that of a bias; with the ReLU before it undone in the same pass.
#include "../column_sums.h"
#include "rows.cuh"

namespace rtdetr::cuda {
namespace {

template <class T, bool with_relu> struct Gradients {
  static constexpr int V = kWidth<T>;
  struct Inputs {
    const T *grad, *result;
    T* g;
  };

  __device__ __forceinline__ Gradients(const Inputs&, int, int) {}
  __device__ __forceinline__ void add(const Inputs& inputs, int64_t at, float (&a)[V], float (&)[V]) const {
    const auto grad = Channels<T, V>::load(inputs.grad + at);
    float g[V];
#pragma unroll
    for (int i = 0; i < V; ++i) g[i] = grad[i];
    if constexpr (with_relu) {
      const auto result = Channels<T, V>::load(inputs.result + at);
#pragma unroll
      for (int i = 0; i < V; ++i) g[i] = result[i] <= 0 ? 0.0f : g[i];
      store(inputs.g + at, g);
    }
#pragma unroll
    for (int i = 0; i < V; ++i) a[i] += g[i];
  }
};

}  // namespace

const char* column_sums(const Rows& grad, const void* result, float* partial, float* sums, void* g, void* stream) {
  return with_kind(grad.type, [&](auto t) {
    using T = decltype(t);
    const auto* values = static_cast<const T*>(grad.values);
    const auto queue = static_cast<cudaStream_t>(stream);
    if (result == nullptr) return sum_rows<T, Gradients<T, false>>(grad, {values, nullptr, nullptr}, partial, nullptr, sums, queue);
    return sum_rows<T, Gradients<T, true>>(grad, {values, static_cast<const T*>(result), static_cast<T*>(g)}, partial, nullptr, sums,
                                           queue);
  });
}

}  // namespace rtdetr::cuda
