// Linear assignment by shortest augmenting paths (Jonker-Volgenant) in float64, one thread per problem.
//
// Every row of the cost matrix is assigned to `room` columns. A row is a box, a column is a query, and `room` is `repeats`:
// one row stands for all copies of a box, because their costs are equal. If there are more copies than queries, not every
// box can get its columns, and the roles are swapped: a row is then a query, and a column is a copy of a box.
#include "../linear_assignment.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace rtdetr::cpu {
namespace {

constexpr double kFar = std::numeric_limits<double>::infinity();
constexpr double kLargest = 1e300;  // largest valid cost: sums along a path stay finite
constexpr int kRoot = -1, kOutside = -2;
constexpr int kLanes = 8;

class Solver {
 public:
  // Writes the row assigned to each column, or -1, to `row_of` (columns,). cost is (rows, columns);
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
  // Grows a shortest-path tree from `root` and assigns 1 to `room` more columns to it. Returns how many.
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
        row_of_[next] = root;  // a path of one edge: no other assignment changes, so the search continues
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

  // Adds `row`, reached at distance `low` through the column `entry`, to the tree and relaxes its edges.
  void enter(int row, int entry, double low) {
    entry_[row] = entry;
    tree_.push_back(row);
    // The columns assigned to the row are at the distance of the row, exactly; computing it would round.
    for (int j = 0; j < columns_; ++j)
      if (row_of_[j] == row && j != entry) include(j, low);
    const double* const cost = cost_ + static_cast<int64_t>(row) * columns_;
    const double base = low - row_dual_[row], name = row;
    double* const reach = reach_.data();
    double* const path = path_.data();
    const double* const dual = dual_outside_.data();
    for (int j = 0; j < columns_; ++j) {
      const double through = base + cost[j] - dual[j];  // infinite for columns in the tree
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

  // The nearest column outside the tree; among equals, the first free one.
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

  // Keeps all reduced costs >= 0, and those of assigned pairs at 0.
  void update_duals(double low) {
    for (const int row : tree_) row_dual_[row] += entry_[row] == kRoot ? low : low - distance_[entry_[row]];
    for (const int column : columns_of_tree_) column_dual_[column] -= low - distance_[column];
  }

  const double* cost_ = nullptr;
  int columns_ = 0;
  int* row_of_ = nullptr;
  std::vector<double> row_dual_, column_dual_;
  std::vector<double> reach_, dual_outside_;  // of columns outside the tree; infinite (dual: negative) for those inside
  std::vector<double> distance_;              // of columns inside the tree
  std::vector<double> path_;                  // row before a column on its path; double, so that the loop vectorises
  std::vector<int> entry_;                    // column through which a row was reached
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
