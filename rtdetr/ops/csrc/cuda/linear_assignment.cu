// Linear assignment by shortest augmenting paths in float64, one block per problem. The algorithm, its names and the swap
// of rows and columns are those of cpu/linear_assignment.cpp. A thread holds columns t, t + kThreads, ... in registers.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "../linear_assignment.h"

namespace rtdetr::cuda {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kMaxImages = 512;  // per launch: `starts` is a kernel argument
constexpr double kLargest = 1e300;  // largest valid cost: sums along a path stay finite
constexpr int kMaxColumns = 16 * kThreads;
constexpr int kRoot = -1, kFree = -1;
constexpr unsigned kFullWarp = 0xffffffffu;

struct Launch {
  const void* cost;
  int64_t* index;
  bool* bad;
  int64_t T, B, first_image;
  const int64_t* counts;  // in device memory; null: use `starts`
  int Q, repeats, max_rows;
  int starts[kMaxImages + 1];  // first box of each image of this launch
};

// A candidate for the nearest column. Compared by distance, then free before assigned, then by column.
struct Candidate {
  double distance;
  int column, owner;
};

__device__ __forceinline__ bool nearer(const Candidate& a, const Candidate& b) {
  if (a.distance != b.distance) return a.distance < b.distance;
  if ((a.owner < 0) != (b.owner < 0)) return a.owner < 0;
  return a.column < b.column;
}

__device__ __forceinline__ Candidate nearest_of_warp(Candidate mine) {
#if __CUDA_ARCH__ >= 800
  // Maps distances to unsigned integers of the same order, whose halves are reduced in turn. Then selects a lane with the
  // minimum, preferably one with a free column.
  const long long bits = __double_as_longlong(mine.distance);
  const unsigned long long key = bits < 0 ? ~bits : bits | 0x8000000000000000ull;
  const unsigned high = key >> 32, low = key;
  const unsigned least_high = __reduce_min_sync(kFullWarp, high);
  const unsigned least_low = __reduce_min_sync(kFullWarp, high == least_high ? low : kFullWarp);
  const bool least = high == least_high && low == least_low;
  const unsigned all = __ballot_sync(kFullWarp, least);
  const unsigned free = __ballot_sync(kFullWarp, least && mine.owner < 0);
  const int lane = __ffs(free ? free : all) - 1;
  return {__shfl_sync(kFullWarp, mine.distance, lane), __shfl_sync(kFullWarp, mine.column, lane),
          __shfl_sync(kFullWarp, mine.owner, lane)};
#else
  for (int step = 16; step > 0; step /= 2) {
    const Candidate other{__shfl_xor_sync(kFullWarp, mine.distance, step), __shfl_xor_sync(kFullWarp, mine.column, step),
                          __shfl_xor_sync(kFullWarp, mine.owner, step)};
    if (nearer(other, mine)) mine = other;
  }
  return mine;
#endif
}

// The cost of a row and a column. With kSwapped a row is a query, and a column is a copy of one of n boxes.
template <class T, bool kSwapped>
__device__ __forceinline__ double cost_at(const T* cost, int row, int column, int n, int Q) {
  return static_cast<double>(kSwapped ? cost[static_cast<int64_t>(column % n) * Q + row]
                                      : cost[static_cast<int64_t>(row) * Q + column]);
}

template <class T, int K, bool kSwapped>
__device__ void solve(const T* cost, int n, int Q, int rows, int columns, int room, int64_t* index, double* row_dual,
                      int* entry, int* path, Candidate (*best)[kWarps]) {
  const int t = threadIdx.x;
  double column_dual[K], distance[K];
  int owner[K];
#pragma unroll
  for (int k = 0; k < K; ++k) column_dual[k] = 0.0, owner[k] = kFree;
  for (int row = t; row < rows; row += kThreads) row_dual[row] = 0.0;
  __syncthreads();
  int turn = 0;
  for (int root = 0; root < rows; ++root) {
    for (int left = room; left > 0;) {
      unsigned inside = 0;  // bit k: this thread's k-th column is in the tree
#pragma unroll
      for (int k = 0; k < K; ++k) {
        distance[k] = INFINITY;
        if (t + k * kThreads >= columns) inside |= 1u << k;
      }
      double low = 0.0;
      int row = root, sink, given = 1;
      bool scan = true;  // `row` has just entered the tree
      while (true) {
        Candidate mine{INFINITY, 0x7fffffff, 0};
        if (scan) {
          const double base = low - row_dual[row];
#pragma unroll
          for (int k = 0; k < K; ++k) {
            const int column = t + k * kThreads;
            if (inside >> k & 1) continue;
            if (owner[k] == row) {  // at the distance of the row, exactly; computing it would round
              distance[k] = low, inside |= 1u << k;
              continue;
            }
            const double through = base + cost_at<T, kSwapped>(cost, row, column, n, Q) - column_dual[k];
            if (through < distance[k]) distance[k] = through, path[column] = row;
          }
        }
#pragma unroll
        for (int k = 0; k < K; ++k) {
          const Candidate candidate{distance[k], t + k * kThreads, owner[k]};
          if (!(inside >> k & 1) && nearer(candidate, mine)) mine = candidate;
        }
        mine = nearest_of_warp(mine);
        if (t % 32 == 0) best[turn][t / 32] = mine;
        __syncthreads();
        mine = best[turn][0];
#pragma unroll
        for (int warp = 1; warp < kWarps; ++warp)
          if (nearer(best[turn][warp], mine)) mine = best[turn][warp];
        turn ^= 1;
        low = mine.distance;
        sink = mine.column;
        const bool direct = mine.owner < 0 && path[sink] == root && given < left;
#pragma unroll
        for (int k = 0; k < K; ++k) {
          if (sink != t + k * kThreads) continue;
          inside |= 1u << k;
          if (direct) owner[k] = root;  // a path of one edge: no other assignment changes, so the search continues
        }
        scan = mine.owner >= 0;
        if (scan) {
          row = mine.owner;
          if (t == 0) entry[row] = sink;
        } else if (direct) {
          ++given;
        } else {
          break;
        }
      }
      left -= given;
      __syncthreads();
      // Keeps all reduced costs >= 0, and those of assigned pairs at 0.
      if (t == 0) row_dual[root] += low;
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const int column = t + k * kThreads;
        if (column >= columns || !(inside >> k & 1)) continue;
        column_dual[k] -= low - distance[k];
        if (owner[k] >= 0 && owner[k] != root && entry[owner[k]] == column) row_dual[owner[k]] += low - distance[k];
      }
      int column = sink;
      while (true) {  // every thread follows the path and reassigns the columns it holds
        const int next = path[column];
        const int before = next == root ? kRoot : entry[next];
#pragma unroll
        for (int k = 0; k < K; ++k)
          if (column == t + k * kThreads) owner[k] = next;
        if (before == kRoot) break;
        column = before;
      }
      __syncthreads();
    }
  }
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const int column = t + k * kThreads;
    if (column >= columns) continue;
    if (!kSwapped) index[column] = owner[k];
    else if (owner[k] >= 0) index[owner[k]] = column % n;
  }
}

template <class T, int K>
__global__ void __launch_bounds__(kThreads) solve_all(const __grid_constant__ Launch launch) {
  extern __shared__ double row_dual[];
  int* const entry = reinterpret_cast<int*>(row_dual + launch.max_rows);
  int* const path = entry + launch.max_rows;
  __shared__ Candidate best[2][kWarps];
  const int b = blockIdx.y, Q = launch.Q, room = launch.starts[b + 1] - launch.starts[b];
  const int n = launch.counts ? max(0, min(room, static_cast<int>(launch.counts[launch.first_image + b]))) : room;
  const T* const cost = static_cast<const T*>(launch.cost) + (blockIdx.x * launch.T + launch.starts[b]) * Q;
  const int64_t problem = blockIdx.x * launch.B + launch.first_image + b;
  int64_t* const index = launch.index + problem * Q;
  bool finite = true;
  for (int64_t i = threadIdx.x; i < static_cast<int64_t>(n) * Q; i += kThreads)
    finite = finite && fabs(static_cast<double>(cost[i])) <= kLargest;
  const bool bad = !__syncthreads_and(finite);
  if (threadIdx.x == 0) launch.bad[problem] = bad;
  if (n == 0 || bad) {
    for (int q = threadIdx.x; q < Q; q += kThreads) index[q] = -1;
    return;
  }
  const int copies = n * launch.repeats;
  if (copies <= Q) solve<T, K, false>(cost, n, Q, n, Q, launch.repeats, index, row_dual, entry, path, best);
  else solve<T, K, true>(cost, n, Q, Q, copies, 1, index, row_dual, entry, path, best);
}

template <class T, int K>
cudaError_t launch_with(const Launch& launch, dim3 blocks, size_t bytes, cudaStream_t stream) {
  const cudaError_t error = cudaFuncSetAttribute(solve_all<T, K>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  solve_all<T, K><<<blocks, kThreads, bytes, stream>>>(launch);
  return cudaGetLastError();
}

template <class T>
cudaError_t launch_for(const Launch& launch, int64_t columns, dim3 blocks, size_t bytes, cudaStream_t stream) {
  if (columns <= 3 * kThreads) return launch_with<T, 3>(launch, blocks, bytes, stream);
  if (columns <= 4 * kThreads) return launch_with<T, 4>(launch, blocks, bytes, stream);
  if (columns <= 8 * kThreads) return launch_with<T, 8>(launch, blocks, bytes, stream);
  return launch_with<T, 16>(launch, blocks, bytes, stream);
}

}  // namespace

const char* linear_assignment(const Assignment& problems, void* stream) {
  for (int64_t first = 0; first < problems.B; first += kMaxImages) {
    const int64_t images = std::min<int64_t>(kMaxImages, problems.B - first);
    Launch launch{problems.cost, problems.index, problems.bad, problems.T, problems.B, first, problems.device_counts};
    launch.Q = static_cast<int>(problems.Q), launch.repeats = static_cast<int>(problems.repeats);
    const int64_t each = problems.T / problems.B;  // rows per image if counts are in device memory
    int64_t start = 0, columns = 0, rows = 1;
    for (int64_t b = 0; b < first; ++b) start += problems.counts ? problems.counts[b] : each;
    for (int64_t b = 0; b < images; ++b) {
      const int64_t n = problems.counts ? problems.counts[first + b] : each, copies = n * problems.repeats;
      launch.starts[b] = static_cast<int>(start);
      start += n;
      columns = std::max(columns, std::max(problems.Q, copies));
      // A count in device memory may be smaller than n; the boxes may then be the rows.
      rows = std::max(rows, copies <= problems.Q ? n : problems.counts ? problems.Q : std::max(problems.Q, n));
    }
    launch.starts[images] = static_cast<int>(start);
    if (columns > kMaxColumns) return "more than 2,048 queries, or copies of the boxes of an image";
    launch.max_rows = static_cast<int>(rows);
    const dim3 blocks(problems.N, images);  // the x of a grid may be 2^31 - 1, its y only 65,535
    const size_t bytes = rows * (sizeof(double) + sizeof(int)) + columns * sizeof(int);
    const auto run = problems.is_double ? launch_for<double> : launch_for<float>;
    if (const cudaError_t error = run(launch, columns, blocks, bytes, static_cast<cudaStream_t>(stream)); error != cudaSuccess)
      return cudaGetErrorString(error);
  }
  return nullptr;
}

}  // namespace rtdetr::cuda
