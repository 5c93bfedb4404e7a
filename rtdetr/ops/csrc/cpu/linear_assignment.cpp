// Shortest augmenting paths in float64, one thread to a problem.
//
// Rows ask for columns: a row is a box with room for `repeats` queries, a column is a query. Copies of a box are never made:
// what one of them may take all of them may take. Where the copies outnumber the queries the roles change, because every row
// has to find its columns: a row is a query then, and a column is a copy of a box.
#include "../linear_assignment.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace rtdetr::cpu {
namespace {

constexpr double kFar = std::numeric_limits<double>::infinity();
constexpr double kLargest = 1e300;  // of a cost: sums along a path stay finite
constexpr int kRoot = -1, kOutside = -2;
constexpr int kLanes = 8;

class Solver {
 public:
  // Writes the row of every column to `row_of` (columns,), -1 where it has none. cost (rows, columns), and
  // rows * room <= columns.
  void solve(const double* cost, int rows, int columns, int room, int* row_of) {
    cost_ = cost, columns_ = columns, row_of_ = row_of;
    std::fill_n(row_of, columns, -1);
    row_dual_.assign(rows, 0.0), column_dual_.assign(columns, 0.0);
    entry_.assign(rows, kOutside);
    path_.resize(columns), distance_.resize(columns);
    for (int row = 0; row < rows; ++row)
      for (int left = room; left > 0;) left -= grow_tree(row, left);
  }

 private:
  // Grows a tree of shortest paths from `root` until one column, or up to `room` of them, went to the rows; returns how many.
  int grow_tree(int root, int room) {
    reach_.assign(columns_, kFar);
    dual_outside_ = column_dual_;
    tree_.clear();
    columns_of_tree_.clear();
    double low = 0.0;
    enter(root, kRoot, low);
    for (int given = 1;;) {
      const int next = nearest();
      low = reach_[next];
      include(next, low);
      if (row_of_[next] >= 0) {
        enter(row_of_[next], next, low);
      } else if (path_[next] == root && given < room) {
        row_of_[next] = root;  // taken without detour, so no path changes and the tree may go on
        ++given;
      } else {
        update_duals(low);
        for (int column = next; column != kRoot;) {
          const int row = static_cast<int>(path_[column]);
          row_of_[column] = row;
          column = entry_[row];
        }
        for (const int row : tree_) entry_[row] = kOutside;
        return given;
      }
    }
  }

  // Takes `row`, reached at distance `low` through the column `entry`, into the tree, and shortens what it leads to.
  void enter(int row, int entry, double low) {
    entry_[row] = entry;
    tree_.push_back(row);
    // All columns of a row are as near as the row itself, whatever rounding says.
    for (int j = 0; j < columns_; ++j)
      if (row_of_[j] == row && j != entry) include(j, low);
    const double* const cost = cost_ + static_cast<int64_t>(row) * columns_;
    const double base = low - row_dual_[row], name = row;
    double* const reach = reach_.data();
    double* const path = path_.data();
    const double* const dual = dual_outside_.data();
    for (int j = 0; j < columns_; ++j) {
      const double through = base + cost[j] - dual[j];  // infinite for columns inside
      const bool shorter = through < reach[j];
      reach[j] = shorter ? through : reach[j];
      path[j] = shorter ? name : path[j];
    }
  }

  void include(int column, double distance) {
    distance_[column] = distance;
    reach_[column] = kFar;
    dual_outside_[column] = -kFar;
    columns_of_tree_.push_back(column);
  }

  // The nearest column outside the tree; a free one if there are several.
  int nearest() const {
    double lanes[kLanes];
    std::fill_n(lanes, kLanes, kFar);
    int j = 0;
    for (; j + kLanes <= columns_; j += kLanes)
      for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = reach_[j + lane] < lanes[lane] ? reach_[j + lane] : lanes[lane];
    for (; j < columns_; ++j) lanes[0] = std::min(lanes[0], reach_[j]);
    const double least = *std::min_element(lanes, lanes + kLanes);
    int first = -1;
    for (j = 0; j < columns_; ++j) {
      if (reach_[j] != least) continue;
      if (row_of_[j] < 0) return j;
      if (first < 0) first = j;
    }
    return first;
  }

  // Keeps every reduced cost at least 0, and at 0 on what is taken.
  void update_duals(double low) {
    for (const int row : tree_) row_dual_[row] += entry_[row] == kRoot ? low : low - distance_[entry_[row]];
    for (const int column : columns_of_tree_) column_dual_[column] -= low - distance_[column];
  }

  const double* cost_ = nullptr;
  int columns_ = 0;
  int* row_of_ = nullptr;
  std::vector<double> row_dual_, column_dual_;
  std::vector<double> reach_, dual_outside_;  // of columns outside the tree; infinite inside
  std::vector<double> distance_;              // of columns inside
  std::vector<double> path_;                  // the row that leads to a column; as wide as the rest of the loop
  std::vector<int> entry_;                    // of a row: the column it was reached through
  std::vector<int> tree_, columns_of_tree_;
};

struct Work {
  const Assignment& problems;
  std::vector<int64_t> starts;
};

template <class T>
void solve_some(int64_t begin, int64_t end, void* context) {
  const auto& [problems, starts] = *static_cast<const Work*>(context);
  const int64_t Q = problems.Q;
  Solver solver;
  std::vector<double> cost;
  std::vector<int> row_of;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t b = i % problems.B, n = problems.counts[b], copies = n * problems.repeats;
    const T* const given = static_cast<const T*>(problems.cost) + (i / problems.B * problems.T + starts[b]) * Q;
    int64_t* const index = problems.index + i * Q;
    std::fill_n(index, Q, -1);
    problems.bad[i] = !std::all_of(given, given + n * Q, [](T x) { return std::abs(static_cast<double>(x)) <= kLargest; });
    if (n == 0 || problems.bad[i]) continue;
    if (copies <= Q) {
      cost.assign(given, given + n * Q);
      row_of.resize(Q);
      solver.solve(cost.data(), static_cast<int>(n), static_cast<int>(Q), static_cast<int>(problems.repeats), row_of.data());
      std::copy(row_of.begin(), row_of.end(), index);
    } else {
      cost.resize(Q * copies);
      for (int64_t q = 0; q < Q; ++q)
        for (int64_t copy = 0; copy < copies; ++copy) cost[q * copies + copy] = given[copy % n * Q + q];
      row_of.resize(copies);
      solver.solve(cost.data(), static_cast<int>(Q), static_cast<int>(copies), 1, row_of.data());
      for (int64_t copy = 0; copy < copies; ++copy)
        if (row_of[copy] >= 0) index[row_of[copy]] = copy % n;
    }
  }
}

}  // namespace

const char* linear_assignment(const Assignment& problems, ParallelFor parallel_for) {
  Work work{problems, {0}};
  for (int64_t b = 0; b < problems.B; ++b) work.starts.push_back(work.starts.back() + problems.counts[b]);
  parallel_for(problems.N * problems.B, 1, problems.is_double ? solve_some<double> : solve_some<float>, &work);
  return nullptr;
}

}  // namespace rtdetr::cpu
