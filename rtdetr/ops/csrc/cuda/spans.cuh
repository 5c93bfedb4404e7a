// Boxes along one axis, with the arithmetic of rtdetr/boxes.py. NaN propagates.
#pragma once

namespace rtdetr::cuda {

constexpr double kGiouEps = 1e-10;

template <class T>
struct Span {
  T low, high;
};

template <class T>
__device__ Span<T> span(T centre, T size) {
  return {centre - T(0.5) * size, centre + T(0.5) * size};
}
template <class T>
__device__ T positive(T x) {
  return x < 0 ? 0 : x;
}
template <class T>
__device__ T most(T a, T b) {
  return a != a || a > b ? a : b;
}
template <class T>
__device__ T least(T a, T b) {
  return a != a || a < b ? a : b;
}
template <class T>
__device__ T area(Span<T> x, Span<T> y) {
  return positive(x.high - x.low) * positive(y.high - y.low);
}

// Lengths of the overlap of two boxes along an axis (negative if they are disjoint) and of their hull.
template <class T>
struct Pair {
  T shared, hull;
};

template <class T>
__device__ Pair<T> pair(Span<T> a, Span<T> b) {
  return {least(a.high, b.high) - most(a.low, b.low), most(a.high, b.high) - least(a.low, b.low)};
}

}  // namespace rtdetr::cuda
