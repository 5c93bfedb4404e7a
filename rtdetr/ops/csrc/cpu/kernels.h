// One set of kernels per instruction set: ms_deform_attn.cpp is compiled once for each, dispatch.cpp selects at run time.
#pragma once

#include "../ms_deform_attn.h"

#define RTDETR_DECLARE_KERNELS(isa)                                                                                      \
  namespace rtdetr::cpu::isa {                                                                                           \
  const char* forward(const Sizes&, const Levels&, const void* value, const void* locations, const void* weights,        \
                      void* output, ParallelFor);                                                                        \
  const char* backward(const Sizes&, const Levels&, const void* grad_output, const void* value, const void* locations,   \
                       const void* weights, void* grad_value, void* grad_locations, void* grad_weights, ParallelFor);    \
  }

RTDETR_DECLARE_KERNELS(baseline)
#ifdef __x86_64__
RTDETR_DECLARE_KERNELS(avx2)
RTDETR_DECLARE_KERNELS(avx512)
#endif
