// Multi-scale deformable attention on the CPU. Letters and layouts: ../ms_deform_attn.h.
//
// Forward: parallel over queries. All bilinear corners ("taps") of a query and head are listed first, then summed for one
// block of channels after another, with the accumulators in registers.
// Backward: parallel over (batch, head, level). Different triples write different elements of every gradient, so there are
// no atomics, and the result does not depend on the number of threads.
#include "kernels.h"
#include "vector.h"

#include <limits>
#include <new>

namespace rtdetr::cpu::RTDETR_ISA {
namespace {

constexpr int kBlock = 4;                    // vectors of channels in registers
constexpr int64_t kGrainOperations = 32768;  // least work of a chunk: less does not pay for a thread

template <typename Acc>
struct Tap {
  int64_t offset;  // elements from the first channel of the level's first cell, for this batch item and head
  Acc weight;
};

// The four cells around a point. `fx`, `fy`: its offset from the first one, in cells.
template <typename Acc>
struct Cell {
  int64_t x, y;
  Acc fx, fy;
  bool inside, nan;
};

// Rounds twice on purpose: a fused multiply-add, which not every processor has, would put a point that lies exactly on a
// cell border into the cell before it. The empty asm statement forces the rounded product into a register.
template <typename Acc>
inline Acc pixel_coordinate(Acc location, int64_t size) {
  Acc product = location * static_cast<Acc>(size);
#ifdef __x86_64__
  asm("" : "+x"(product));
#else
  asm("" : "+w"(product));
#endif
  return product - static_cast<Acc>(0.5);
}

template <typename Acc>
inline Cell<Acc> find_cell(const Acc* location, int64_t height, int64_t width) {
  const Acc x = pixel_coordinate(location[0], width), y = pixel_coordinate(location[1], height);
  Cell<Acc> cell{};
  cell.nan = x != x || y != y;
  // -1 is inside: the weight of the first map cell is 0 there, but its slope, for the location gradient, is not.
  cell.inside = x >= -1 && y >= -1 && x < static_cast<Acc>(width) && y < static_cast<Acc>(height);
  if (!cell.inside) return cell;
  cell.x = static_cast<int64_t>(x);  // truncates; the corrections below make it the floor
  cell.y = static_cast<int64_t>(y);
  if (x < static_cast<Acc>(cell.x)) --cell.x;
  if (y < static_cast<Acc>(cell.y)) --cell.y;
  cell.fx = x - static_cast<Acc>(cell.x);
  cell.fy = y - static_cast<Acc>(cell.y);
  return cell;
}

// Lists the corners of all points of one query and head; returns their number. A NaN location makes `poison` NaN.
template <typename Acc>
int64_t list_taps(const Sizes& n, const int64_t* hw, const Acc* locations, const Acc* weights, Tap<Acc>* taps, Acc* poison) {
  const int64_t stride = n.H * n.D;
  int64_t count = 0, start = 0;
  for (int64_t l = 0; l < n.L; ++l) {
    const int64_t height = hw[2 * l], width = hw[2 * l + 1];
    for (int64_t p = 0; p < n.P; ++p, locations += 2, ++weights) {
      const Cell<Acc> cell = find_cell(locations, height, width);
      if (!cell.inside) {
        *poison += cell.nan ? std::numeric_limits<Acc>::quiet_NaN() : *weights * 0;
        continue;
      }
      const int64_t first = (start + cell.y * width + cell.x) * stride;
      const Acc bottom = *weights * cell.fy, top = *weights - bottom;
      const bool left_in = cell.x >= 0, right_in = cell.x + 1 < width;
      if (cell.y >= 0) {
        if (left_in) taps[count++] = {first, top - top * cell.fx};
        if (right_in) taps[count++] = {first + stride, top * cell.fx};
      }
      if (cell.y + 1 < height) {
        if (left_in) taps[count++] = {first + width * stride, bottom - bottom * cell.fx};
        if (right_in) taps[count++] = {first + (width + 1) * stride, bottom * cell.fx};
      }
    }
    start += height * width;
  }
  return count;
}

template <int N, typename T, typename Acc>
inline void sum_taps(const T* value, const Tap<Acc>* taps, int64_t count, Acc poison, T* output) {
  using Vector = typename VectorOf<Acc>::type;
  constexpr int lanes = VectorOf<Acc>::lanes;
  Vector sums[N];
  for (int i = 0; i < N; ++i) sums[i] = Vector{} + poison;
  for (int64_t t = 0; t < count; ++t) {
    const T* row = value + taps[t].offset;
    for (int i = 0; i < N; ++i) sums[i] += load(row + i * lanes) * taps[t].weight;
  }
  for (int i = 0; i < N; ++i) store(sums[i], output + i * lanes);
}

template <typename T, typename Acc>
void sum_taps_tail(const T* value, const Tap<Acc>* taps, int64_t count, Acc poison, T* output, int64_t channels) {
  typename VectorOf<Acc>::type sums = {};
  sums += poison;
  for (int64_t t = 0; t < count; ++t) sums += load_part(value + taps[t].offset, channels) * taps[t].weight;
  store_part(sums, output, channels);
}

template <typename T>
struct Forward {
  using Acc = typename Accumulator<T>::type;
  const Sizes& n;
  const int64_t* hw;
  const T* value;
  const Acc* locations;
  const Acc* weights;
  T* output;
  Tap<Acc>* taps;

  void item(int64_t b, int64_t q, int64_t h) const {
    const int64_t index = (b * n.Q + q) * n.H + h, points = n.L * n.P;
    Acc poison = 0;
    const int64_t count = list_taps(n, hw, locations + 2 * index * points, weights + index * points, taps, &poison);
    const T* from = value + (b * n.S * n.H + h) * n.D;
    T* to = output + index * n.D;
    constexpr int lanes = VectorOf<Acc>::lanes;
    int64_t d = 0;
    for (; d + kBlock * lanes <= n.D; d += kBlock * lanes) sum_taps<kBlock>(from + d, taps, count, poison, to + d);
    for (; d + 2 * lanes <= n.D; d += 2 * lanes) sum_taps<2>(from + d, taps, count, poison, to + d);
    for (; d + lanes <= n.D; d += lanes) sum_taps<1>(from + d, taps, count, poison, to + d);
    if (d < n.D) sum_taps_tail(from + d, taps, count, poison, to + d, n.D - d);
  }
};

template <typename T>
struct Backward {
  using Acc = typename Accumulator<T>::type;
  using Vector = typename VectorOf<Acc>::type;
  static constexpr int lanes = VectorOf<Acc>::lanes;
  const Sizes& n;
  const int64_t* hw;
  const T* grad_output;
  const T* value;
  const Acc* locations;
  const Acc* weights;
  T* grad_value;
  Acc* grad_locations;
  Acc* grad_weights;

  // Adds grad * scale to a row of the value gradient. Returns per-lane partial sums of <grad, value row>.
  static inline Vector corner(const T* grad, const T* row, Acc* grad_row, Acc scale, int64_t channels) {
    Vector dot = {};
    int64_t d = 0;
    for (; d + lanes <= channels; d += lanes) {
      const Vector g = load(grad + d);
      dot += g * load(row + d);
      if (grad_row != nullptr) {
        const Vector sum = load(grad_row + d) + g * scale;
        store(sum, grad_row + d);
      }
    }
    if (d < channels) {
      const Vector g = load_part(grad + d, channels - d);
      dot += g * load_part(row + d, channels - d);
      if (grad_row != nullptr) store_part(load_part(grad_row + d, channels - d) + g * scale, grad_row + d, channels - d);
    }
    return dot;
  }

  // One point. `rows`: value of the level's first cell; `sums`: its gradient, with `sums_stride` elements between cells.
  void point(int64_t index, const T* grad, const T* rows, Acc* sums, int64_t sums_stride, int64_t height, int64_t width) const {
    const Cell<Acc> cell = find_cell(locations + 2 * index, height, width);
    const Acc weight = weights[index], fx = cell.fx, fy = cell.fy;
    Acc gradient[3] = {0, 0, 0};  // of the weight, of x, of y
    if (cell.inside) {
      const int64_t first = cell.y * width + cell.x;
      const Acc bilinear[4] = {(1 - fy) * (1 - fx), (1 - fy) * fx, fy * (1 - fx), fy * fx};
      const Acc slope_x[4] = {fy - 1, 1 - fy, -fy, fy}, slope_y[4] = {fx - 1, -fx, 1 - fx, fx};
      Vector lanes_of[3] = {};
      for (int c = 0; c < 4; ++c) {
        const int64_t x = cell.x + (c & 1), y = cell.y + (c >> 1), at = first + (c & 1) + (c >> 1) * width;
        if (x < 0 || x >= width || y < 0 || y >= height) continue;
        Acc* sum = sums == nullptr ? nullptr : sums + at * sums_stride;
        const Vector dot = corner(grad, rows + at * n.H * n.D, sum, weight * bilinear[c], n.D);
        lanes_of[0] += dot * bilinear[c];
        lanes_of[1] += dot * slope_x[c];
        lanes_of[2] += dot * slope_y[c];
      }
      for (int i = 0; i < 3; ++i) gradient[i] = sum_lanes(lanes_of[i]);
    } else if (cell.nan) {
      for (Acc& g : gradient) g = std::numeric_limits<Acc>::quiet_NaN();
    }
    if (grad_weights != nullptr) grad_weights[index] = gradient[0];
    if (grad_locations != nullptr) {
      grad_locations[2 * index] = gradient[1] * weight * static_cast<Acc>(width);
      grad_locations[2 * index + 1] = gradient[2] * weight * static_cast<Acc>(height);
    }
  }

  // All points of one batch item, head and level. `scratch`: float accumulators for 16-bit gradients, else null.
  void unit(int64_t b, int64_t h, int64_t l, Acc* scratch) const {
    int64_t start = 0;
    for (int64_t i = 0; i < l; ++i) start += hw[2 * i] * hw[2 * i + 1];
    const int64_t height = hw[2 * l], width = hw[2 * l + 1], cells = height * width, stride = n.H * n.D;
    const int64_t first = ((b * n.S + start) * n.H + h) * n.D;
    T* out = grad_value == nullptr ? nullptr : grad_value + first;
    Acc* sums = scratch == nullptr ? reinterpret_cast<Acc*>(out) : scratch;
    const int64_t sums_stride = scratch == nullptr ? stride : n.D;
    if (out != nullptr) {
      for (int64_t i = 0; i < cells; ++i) std::memset(sums + i * sums_stride, 0, static_cast<size_t>(n.D) * sizeof(Acc));
    }
    for (int64_t q = 0; q < n.Q; ++q) {
      const int64_t item = (b * n.Q + q) * n.H + h;
      for (int64_t p = 0; p < n.P; ++p) {
        point((item * n.L + l) * n.P + p, grad_output + item * n.D, value + first, sums, sums_stride, height, width);
      }
    }
    if (out != nullptr && scratch != nullptr) {
      for (int64_t i = 0; i < cells; ++i) {
        int64_t d = 0;
        for (; d + lanes <= n.D; d += lanes) store(load(scratch + i * n.D + d), out + i * stride + d);
        for (; d < n.D; ++d) store(scratch[i * n.D + d], out + i * stride + d);
      }
    }
  }
};

// Shared by all threads. A range whose allocation fails sets out_of_memory.
template <typename Work>
struct Shared {
  const Work* work;
  int64_t scratch_size;
  bool out_of_memory;
};
constexpr const char* kOutOfMemory = "the processor has no memory left for the op's scratch space";

template <typename T>
void forward_range(int64_t begin, int64_t end, void* context) {
  auto& shared = *static_cast<Shared<Forward<T>>*>(context);
  Forward<T> work = *shared.work;
  work.taps = new (std::nothrow) Tap<typename Forward<T>::Acc>[static_cast<size_t>(shared.scratch_size)];
  if (work.taps == nullptr) {
    shared.out_of_memory = true;
    return;
  }
  for (int64_t i = begin; i < end; ++i) {
    for (int64_t h = 0; h < work.n.H; ++h) work.item(i / work.n.Q, i % work.n.Q, h);
  }
  delete[] work.taps;
}

template <typename T>
void backward_range(int64_t begin, int64_t end, void* context) {
  auto& shared = *static_cast<Shared<Backward<T>>*>(context);
  const Backward<T>& work = *shared.work;
  using Acc = typename Backward<T>::Acc;
  Acc* scratch = nullptr;
  if (shared.scratch_size > 0) {
    scratch = new (std::nothrow) Acc[static_cast<size_t>(shared.scratch_size)];
    if (scratch == nullptr) {
      shared.out_of_memory = true;
      return;
    }
  }
  const Sizes& n = work.n;
  for (int64_t i = begin; i < end; ++i) work.unit(i / (n.H * n.L), i / n.L % n.H, i % n.L, scratch);
  delete[] scratch;
}

template <typename T>
const char* run_forward(const Sizes& n, const int64_t* hw, const void* value, const void* locations, const void* weights,
                        void* output, ParallelFor parallel_for) {
  using Acc = typename Accumulator<T>::type;
  const Forward<T> work{n, hw, static_cast<const T*>(value), static_cast<const Acc*>(locations),
                        static_cast<const Acc*>(weights), static_cast<T*>(output), nullptr};
  const int64_t operations = n.H * n.L * n.P * n.D;
  Shared<Forward<T>> shared{&work, 4 * n.L * n.P + 1, false};
  parallel_for(n.B * n.Q, 1 + kGrainOperations / (operations + 1), forward_range<T>, &shared);
  return shared.out_of_memory ? kOutOfMemory : nullptr;
}

template <typename T>
const char* run_backward(const Sizes& n, const int64_t* hw, const void* grad_output, const void* value,
                         const void* locations, const void* weights, void* grad_value, void* grad_locations,
                         void* grad_weights, ParallelFor parallel_for) {
  using Acc = typename Accumulator<T>::type;
  const Backward<T> work{n,
                         hw,
                         static_cast<const T*>(grad_output),
                         static_cast<const T*>(value),
                         static_cast<const Acc*>(locations),
                         static_cast<const Acc*>(weights),
                         static_cast<T*>(grad_value),
                         static_cast<Acc*>(grad_locations),
                         static_cast<Acc*>(grad_weights)};
  int64_t largest = 0;
  for (int64_t l = 0; l < n.L; ++l) largest = largest > hw[2 * l] * hw[2 * l + 1] ? largest : hw[2 * l] * hw[2 * l + 1];
  const bool needs_scratch = sizeof(T) < sizeof(Acc) && grad_value != nullptr;
  Shared<Backward<T>> shared{&work, needs_scratch ? largest * n.D : 0, false};
  parallel_for(n.B * n.H * n.L, 1, backward_range<T>, &shared);
  return shared.out_of_memory ? kOutOfMemory : nullptr;
}

}  // namespace

const char* forward(const Sizes& sizes, const Levels& levels, const void* value, const void* locations, const void* weights,
                    void* output, ParallelFor parallel_for) {
  const auto run = sizes.dtype == DType::f32   ? run_forward<float>
                   : sizes.dtype == DType::f64 ? run_forward<double>
                   : sizes.dtype == DType::f16 ? run_forward<Half>
                                               : run_forward<BFloat16>;
  return run(sizes, levels.hw, value, locations, weights, output, parallel_for);
}

const char* backward(const Sizes& sizes, const Levels& levels, const void* grad_output, const void* value,
                     const void* locations, const void* weights, void* grad_value, void* grad_locations,
                     void* grad_weights, ParallelFor parallel_for) {
  const auto run = sizes.dtype == DType::f32   ? run_backward<float>
                   : sizes.dtype == DType::f64 ? run_backward<double>
                   : sizes.dtype == DType::f16 ? run_backward<Half>
                                               : run_backward<BFloat16>;
  return run(sizes, levels.hw, grad_output, value, locations, weights, grad_value, grad_locations, grad_weights,
             parallel_for);
}

}  // namespace rtdetr::cpu::RTDETR_ISA
