// Sums over the rows of a gradient: the gradient of a bias. Can include the backward pass of the ReLU after the bias.
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

  struct Loaded {
    Channels<T, V> grad, result;
  };

  __device__ __forceinline__ Gradients(const Inputs&, int, int) {}
  static __device__ __forceinline__ Loaded load(const Inputs& inputs, int64_t at) {
    Loaded loaded{Channels<T, V>::load(inputs.grad + at), {}};
    if constexpr (with_relu) loaded.result = Channels<T, V>::load(inputs.result + at);
    return loaded;
  }
  __device__ __forceinline__ void add(const Inputs& inputs, int64_t at, const Loaded& loaded, float (&a)[V],
                                      float (&)[V]) const {
    float g[V];
#pragma unroll
    for (int i = 0; i < V; ++i) {
      g[i] = with_relu && loaded.result[i] <= 0 ? 0.0f : loaded.grad[i];
      a[i] += g[i];
    }
    if constexpr (with_relu) store(inputs.g + at, g);
  }
  static __device__ __forceinline__ void close(float (&)[V]) {}
};

}  // namespace

const char* column_sums(const Rows& grad, const void* result, float* partial, float* sums, void* g, void* stream) {
  return with_kind(grad.type, [&](auto t) {
    using T = decltype(t);
    const auto* values = static_cast<const T*>(grad.values);
    const auto queue = static_cast<cudaStream_t>(stream);
    if (result == nullptr)
      return sum_rows<T, Gradients<T, false>>(grad, {values, nullptr, nullptr}, partial, nullptr, sums, queue);
    return sum_rows<T, Gradients<T, true>>(grad, {values, static_cast<const T*>(result), static_cast<T*>(g)}, partial, nullptr,
                                           sums, queue);
  });
}

}  // namespace rtdetr::cuda
