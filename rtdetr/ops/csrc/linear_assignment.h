// Interface between the operators (linear_assignment.cpp: tensors, checks, registration) and the solvers (cpu/, cuda/:
// pointers and sizes only).
//
//   cost (N, T, Q): N sets of problems, T boxes of all B images, image after image, Q queries. A problem is the boxes of
//   one image in one set. Each box is assigned to `repeats` queries, or fewer if there are too few queries.
//   index (N, B, Q): the box assigned to a query, counted within its image, or -1.
//   bad (N, B): true if a cost of the problem is NaN, infinite or beyond 1e300; its index is then -1 throughout.
#pragma once

#include <cstdint>

namespace rtdetr {

struct Assignment {
  const void* cost;
  bool is_double;        // else float
  int64_t N, T, Q, B;
  const int64_t* counts;  // (B,) boxes per image, on the host; null: use device_counts
  const int64_t* device_counts;  // (B,) the same in device memory (cuda only); each image then has T / B rows, its boxes
                                 // first
  int64_t repeats;
  int64_t* index;
  bool* bad;
};

// Both return nullptr, or an error message (static storage).
namespace cuda {
const char* linear_assignment(const Assignment& problems, void* stream);
}
namespace cpu {
using ParallelFor = void (*)(int64_t count, int64_t grain, void (*body)(int64_t, int64_t, void*), void* context);
const char* linear_assignment(const Assignment& problems, ParallelFor parallel_for);
}

}  // namespace rtdetr
