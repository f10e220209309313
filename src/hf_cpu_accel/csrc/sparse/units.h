// How a graph is divided among threads: pieces of nearly equal work, the same for every number of threads, so that sums are the same too.
#pragma once
#include <algorithm>
#include <atomic>
#include <vector>

#include "../dispatch.h"
#include "../team.h"
#include "../workspace.h"

namespace hfca {

// Rows [begin, end); or a row with so many edges that several threads share it: begin is the row, and `part` the number of its first part.
struct RowUnit {
  int64_t begin, end, part = -1;
};

constexpr int64_t unit_work = 4096;  // edges, where a row counts as much as four
constexpr int64_t hub_edges = 4 * unit_work;

// The first row at or after `begin` by which so much work is done. rowptr need not be in order: whatever comes out is a row.
inline int64_t row_after(const Csr& graph, int64_t begin, int64_t work) {
  const auto done = [&](int64_t row) { return static_cast<int64_t>(graph.rowptr[row]) + 4 * row; };
  int64_t low = begin + 1, high = graph.rows;
  const int64_t wanted = done(begin) + work;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    done(middle) < wanted ? low = middle + 1 : high = middle;
  }
  return low;
}

struct RowUnits {
  std::vector<RowUnit> units;
  std::vector<RowPart> parts;  // of the rows that are shared

  RowUnits(const Csr& graph, bool share_hubs) {
    for (int64_t row = 0; row < graph.rows;) {
      int64_t end = row_after(graph, row, unit_work);
      const int64_t first = graph.rowptr[end - 1], last = graph.rowptr[end];
      const bool hub = share_hubs && first >= 0 && last <= graph.edges && last - first > hub_edges;
      if (hub) {
        if (end - 1 > row) units.push_back({row, end - 1});
        units.push_back({end - 1, end, static_cast<int64_t>(parts.size())});
        for (int64_t e = first; e < last; e += unit_work) parts.push_back({end - 1, e, std::min(e + unit_work, last), nullptr, nullptr});
      } else {
        units.push_back({row, end});
      }
      row = end;
    }
  }
};

inline int64_t sparse_team(double edges, double rows, double features) { return team_size((edges + rows) * (features + 4)); }

// Whether all rows refer to what is there, and the one number of rowptr where there are none.
inline bool valid_graph(const Csr& graph) { return dispatch().kernels.sparse.valid(graph, 0, graph.rows); }

// f(begin, end) over all rows once what they refer to was found to be there; false if it was not. share_hubs is for callers that do the
// parts themselves.
template <class F>
bool each_rows(const Csr& graph, int64_t features, const F& f) {
  if (graph.rows == 0) return valid_graph(graph);
  const RowUnits work(graph, false);
  std::atomic<bool> valid{true};
  const auto check = dispatch().kernels.sparse.valid;
  run_team(sparse_team(static_cast<double>(graph.edges), static_cast<double>(graph.rows), static_cast<double>(features)), [&](Team& team) {
    team.claim(static_cast<int64_t>(work.units.size()), [&](int64_t u) {
      const RowUnit unit = work.units[static_cast<size_t>(u)];
      if (!check(graph, unit.begin, unit.end)) return valid.store(false, std::memory_order_relaxed);
      f(unit.begin, unit.end);
    });
  });
  return valid.load();
}

// The edges of the longest of rows [begin, end).
inline int64_t longest_row(const Csr& graph, int64_t begin, int64_t end) {
  int64_t longest = 0;
  for (int64_t row = begin; row < end; ++row) longest = std::max(longest, static_cast<int64_t>(graph.rowptr[row + 1]) - graph.rowptr[row]);
  return longest;
}

// Features that are gathered per sweep over the graph. Wide rows come in several sweeps, so that more of them stay in the caches.
constexpr int64_t sweep_features = 128;

// Adds up the parts of a shared row, in their order, and finishes it as if it had been one.
inline void finish_hub(const Spmm& s, const RowPart* parts, int64_t count) {
  const bool extreme = s.reduce == Reduce::min || s.reduce == Reduce::max;
  const int64_t row = parts[0].row;
  const float degree = static_cast<float>(parts[count - 1].end - parts[0].begin);
  for (int64_t k = 0; k < s.features; ++k) {
    float sum = parts[0].sums[k], ties = s.ties ? parts[0].ties[k] : 0.0f;
    for (int64_t p = 1; p < count; ++p) {
      const float other = parts[p].sums[k];
      if (!extreme) {
        sum += other;
        continue;
      }
      const bool further = s.reduce == Reduce::max ? other > sum : other < sum;
      if (s.ties) ties = further ? parts[p].ties[k] : other == sum ? ties + parts[p].ties[k] : ties;
      if (further || other != other) sum = sum == sum ? other : sum;
    }
    if (s.reduce == Reduce::mean) sum /= degree;
    parts[0].sums[k] = sum;
    if (s.ties) s.ties[row * s.features + k] = std::max(ties, 1.0f);
  }
}

// See Spmm. False where rowptr or col refer to what is not there.
inline bool run_spmm(const Spmm& problem) {
  RowUnits work(problem.graph, true);
  const int64_t features = problem.features;
  const int64_t sums = static_cast<int64_t>(work.parts.size()) * features;
  Workspace workspace(2 * Workspace::size_of<float>(sums) + Workspace::size_of<int32_t>(2));
  float *all_sums = workspace.take<float>(sums), *all_ties = workspace.take<float>(sums);
  for (size_t i = 0; i < work.parts.size(); ++i) {
    work.parts[i].sums = all_sums + static_cast<int64_t>(i) * features;
    work.parts[i].ties = all_ties + static_cast<int64_t>(i) * features;
  }
  std::atomic<bool> valid{true};
  const SparseKernels& kernels = dispatch().kernels.sparse;
  const int64_t sweep = problem.heads > 1 && problem.value ? features : sweep_features;
  const double edges = static_cast<double>(problem.graph.edges), rows = static_cast<double>(problem.graph.rows);
  run_team(sparse_team(edges, rows, static_cast<double>(features)), [&](Team& team) {
    const Spmm s = problem;  // see gemm/driver.h
    const auto sum_rows = [&](const RowUnit& unit, int64_t first, int64_t last) {
      kernels.spmm_rows(s, unit.begin, unit.end, first, last);
    };
    team.claim(static_cast<int64_t>(work.units.size()), [&](int64_t u) {
      const RowUnit unit = work.units[static_cast<size_t>(u)];
      if (!kernels.valid(s.graph, unit.begin, unit.end)) valid.store(false, std::memory_order_relaxed);
      else if (unit.part < 0) sum_rows(unit, 0, std::min(sweep, features));
    });
    if (!valid.load(std::memory_order_relaxed)) return;
    for (int64_t first = sweep; first < features; first += sweep)
      team.claim(static_cast<int64_t>(work.units.size()), [&](int64_t u) {
        const RowUnit unit = work.units[static_cast<size_t>(u)];
        if (unit.part < 0) sum_rows(unit, first, std::min(first + sweep, features));
      });
    if (work.parts.empty()) return;
    team.claim(static_cast<int64_t>(work.parts.size()),
               [&](int64_t p) { kernels.spmm_part(s, work.parts[static_cast<size_t>(p)], 0, features); });
    team.claim(static_cast<int64_t>(work.units.size()), [&](int64_t u) {
      const RowUnit unit = work.units[static_cast<size_t>(u)];
      if (unit.part < 0) return;
      const RowPart* parts = work.parts.data() + unit.part;
      int64_t count = 1;
      while (unit.part + count < static_cast<int64_t>(work.parts.size()) && parts[count].row == parts[0].row) ++count;
      finish_hub(s, parts, count);
      kernels.finish_row(s, parts[0].row, parts[0].sums);
    });
  });
  return valid.load();
}

}  // namespace hfca
