// Sorting edges into compressed sparse rows, and transposing those: schema, checks, call. See ops/sparse.py for what they compute.
#include <algorithm>
#include <tuple>

#include "../sparse/arguments.h"
#include "../sparse/coo_to_csr.h"
#include "../sparse/units.h"

namespace hfca {
namespace {

// Calls f(e, row, col) for edges [begin, end).
template <class Index>
struct Coordinates {
  const Index *row, *col;
  int64_t row_stride, col_stride;
  template <class F>
  void operator()(int64_t begin, int64_t end, const F& f) const {
    for (int64_t e = begin; e < end; ++e) f(e, static_cast<int64_t>(row[e * row_stride]), static_cast<int64_t>(col[e * col_stride]));
  }
};

// The same for the transpose of a CSR with a rowptr that is in order.
struct Transposed {
  Csr graph;
  template <class F>
  void operator()(int64_t begin, int64_t end, const F& f) const {
    const int32_t* last = graph.rowptr + graph.rows + 1;
    for (int64_t target = std::upper_bound(graph.rowptr, last, begin) - graph.rowptr - 1, e = begin; e < end; ++target)
      for (; e < std::min<int64_t>(end, graph.rowptr[target + 1]); ++e) f(e, static_cast<int64_t>(graph.col[e]), target);
  }
};

template <class Each, class Skip>
std::tuple<Tensor, Tensor, Tensor> sorted(int64_t edges, int64_t entries, int64_t rows, int64_t cols, int64_t loops, bool order,
                                          const Each& each, const Skip& skip, bool& inside) {
  Tensor rowptr = empty_int32(rows + 1), sources = empty_int32(entries + loops), orders = empty_int32(order ? entries + loops : 0);
  const CsrOutput out{static_cast<int32_t*>(rowptr.mutable_data_ptr()), static_cast<int32_t*>(sources.mutable_data_ptr()),
                      order ? static_cast<int32_t*>(orders.mutable_data_ptr()) : nullptr, entries + loops};
  EdgeSort sort(edges, rows, team_size(4.0 * static_cast<double>(edges + rows)));
  Workspace workspace(sort.workspace_size());
  sort.take(workspace);
  std::atomic<bool> valid{true};
  run_team(sort.threads(), [&](Team& team) { sort.run(team, cols, loops, each, skip, valid, out); });
  inside = valid.load();
  return {rowptr, sources, orders};
}

template <class Index>
std::tuple<Tensor, Tensor, Tensor> sorted_coordinates(const Tensor& row, const Tensor& col, int64_t rows, int64_t cols, int64_t loops,
                                                      bool order, bool& inside) {
  const Coordinates<Index> each{static_cast<const Index*>(row.data_ptr()), static_cast<const Index*>(col.data_ptr()), row.stride(0),
                                col.stride(0)};
  const int64_t edges = row.size(0);
  if (loops < 0) return sorted(edges, edges, rows, cols, 0, order, each, [](int64_t, int64_t) { return false; }, inside);
  return sorted(edges, edges, rows, cols, loops, order, each, [](int64_t r, int64_t c) { return r == c; }, inside);
}

std::tuple<Tensor, Tensor, Tensor> coo_to_csr(const Tensor& row, const Tensor& col, int64_t rows, int64_t cols, int64_t loops, bool order) {
  const bool wide = row.scalar_type() == ScalarType::Long;
  STD_TORCH_CHECK(row.dim() == 1 && col.dim() == 1 && row.size(0) == col.size(0) && row.is_cpu() && col.is_cpu() &&
                      row.scalar_type() == col.scalar_type() && (wide || row.scalar_type() == ScalarType::Int),
                  "hf_cpu_accel::coo_to_csr: row and col must be vectors of one length, both int64 or int32, on the CPU");
  STD_TORCH_CHECK(rows >= 0 && cols >= 0 && loops <= std::min(rows, cols) && rows <= most_edges && cols <= most_edges &&
                      row.numel() <= most_edges,
                  "hf_cpu_accel::coo_to_csr: rows, cols and edges must be from 0 to 2^30, and loops at most the smaller of rows and cols");
  bool inside = true;
  auto result = wide ? sorted_coordinates<int64_t>(row, col, rows, cols, loops, order, inside)
                     : sorted_coordinates<int32_t>(row, col, rows, cols, loops, order, inside);
  STD_TORCH_CHECK(inside, "hf_cpu_accel::coo_to_csr: an index is negative or out of range: row must be below ", rows, " and col below ",
                  cols);
  return result;
}

std::tuple<Tensor, Tensor, Tensor> csr_transpose(const Tensor& rowptr, const Tensor& col, int64_t cols) {
  STD_TORCH_CHECK(cols >= 0 && cols <= most_edges, "hf_cpu_accel::csr_transpose: cols must be from 0 to 2^30");
  const Csr graph = csr_of("csr_transpose", rowptr, col, 0, cols);
  bool valid = true;
  for (int64_t r = 0; r < graph.rows; ++r) valid &= graph.rowptr[r] <= graph.rowptr[r + 1];
  check_graph(valid && graph.rowptr[0] == 0 && graph.rowptr[graph.rows] <= graph.edges, "csr_transpose");
  bool inside = true;
  auto result = sorted(
      graph.rowptr[graph.rows], graph.edges, cols, graph.rows, 0, true, Transposed{graph}, [](int64_t, int64_t) { return false; }, inside);
  check_graph(inside, "csr_transpose");
  return result;
}

}  // namespace
}  // namespace hfca

HFCA_OP(coo_to_csr, "(Tensor row, Tensor col, SymInt rows, SymInt cols, SymInt loops, bool order) -> (Tensor, Tensor, Tensor)")
HFCA_OP(csr_transpose, "(Tensor rowptr, Tensor col, SymInt cols) -> (Tensor, Tensor, Tensor)")
