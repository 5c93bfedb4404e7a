// The border between the dispatcher (linear_assignment.cpp: tensors, checks, registration) and the solvers (cpu/, cuda/:
// pointers and sizes only).
//
//   cost (N, T, Q): N sets of problems, T boxes of B images one after the other, Q queries; a problem is the boxes of one
//   image in one set. Every box is offered `repeats` times. index (N, B, Q): the box of its image that a query got, or -1.
//   bad (N, B): whether a cost of the problem is NaN or infinite; its index is all -1 then.
#pragma once

#include <cstdint>

namespace rtdetr {

struct Assignment {
  const void* cost;
  bool is_double;        // else float
  int64_t N, T, Q, B;
  const int64_t* counts;  // (B,) boxes of each image, on the host; null: device_counts
  const int64_t* device_counts;  // (B,) the same where the host does not know them; every image then has T / B rows, and
                                 // its boxes are the first of them (cuda only)
  int64_t repeats;
  int64_t* index;
  bool* bad;
};

// Both return null, or a static sentence that says what went wrong.
namespace cuda {
const char* linear_assignment(const Assignment& problems, void* stream);
}
namespace cpu {
using ParallelFor = void (*)(int64_t count, int64_t grain, void (*body)(int64_t, int64_t, void*), void* context);
const char* linear_assignment(const Assignment& problems, ParallelFor parallel_for);
}

}  // namespace rtdetr
