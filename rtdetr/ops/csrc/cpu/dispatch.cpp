// Selects the kernels for the widest instruction set that the processor supports.
#include "kernels.h"

namespace rtdetr::cpu {
namespace {

struct Kernels {
  decltype(&baseline::forward) forward;
  decltype(&baseline::backward) backward;
};

const Kernels& kernels() {
  static const Kernels chosen = [] {
#ifdef __x86_64__
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (avx2 && __builtin_cpu_supports("avx512f")) return Kernels{avx512::forward, avx512::backward};
    if (avx2) return Kernels{avx2::forward, avx2::backward};
#endif
    return Kernels{baseline::forward, baseline::backward};
  }();
  return chosen;
}

}  // namespace

const char* forward(const Sizes& sizes, const Levels& levels, const void* value, const void* locations, const void* weights,
                    void* output, ParallelFor parallel_for) {
  return kernels().forward(sizes, levels, value, locations, weights, output, parallel_for);
}

const char* backward(const Sizes& sizes, const Levels& levels, const void* grad_output, const void* value,
                     const void* locations, const void* weights, void* grad_value, void* grad_locations,
                     void* grad_weights, ParallelFor parallel_for) {
  return kernels().backward(sizes, levels, grad_output, value, locations, weights, grad_value, grad_locations, grad_weights,
                            parallel_for);
}

}  // namespace rtdetr::cpu
