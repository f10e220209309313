// From tensors to the plain views of sparse kernels: graphs, edge values and rows of features, checked.
#pragma once
#include <limits>

#include "../tensors.h"
#include "sparse.h"

namespace hfca {

constexpr int64_t most_edges = std::numeric_limits<int32_t>::max() / 2;

inline Tensor empty_int32(int64_t count) { return empty_of({count}, ScalarType::Int, 4); }
inline Tensor empty_float32(const std::vector<int64_t>& sizes) { return empty_of(sizes, ScalarType::Float, 4); }

inline const int32_t* indices(const Tensor& t, const char* op, const char* name) {
  STD_TORCH_CHECK(t.is_cpu() && t.scalar_type() == ScalarType::Int && t.dim() == 1 && t.is_contiguous(), "hf_cpu_accel::", op, ": ", name,
                  " must be a contiguous vector of int32 on the CPU");
  return static_cast<const int32_t*>(t.data_ptr());
}

inline Csr csr_of(const char* op, const Tensor& rowptr, const OptionalTensor& col, int64_t edges, int64_t sources) {
  Csr graph;
  graph.rowptr = indices(rowptr, op, "rowptr");
  graph.rows = rowptr.size(0) - 1;
  STD_TORCH_CHECK(graph.rows >= 0, "hf_cpu_accel::", op, ": rowptr must have at least one element");
  if (col) graph.col = indices(*col, op, "col");
  graph.edges = col ? col->size(0) : edges;
  graph.sources = sources;
  STD_TORCH_CHECK(graph.edges <= 2 * most_edges, "hf_cpu_accel::", op, ": more than 2^31 edges");
  return graph;
}

// Throws away what an op that found a bad graph has computed.
inline void check_graph(bool valid, const char* op) {
  STD_TORCH_CHECK(valid, "hf_cpu_accel::", op, ": rowptr must not decrease or go beyond col, and col must be rows that exist");
}

inline const float* floats(const Tensor& t, const char* op, const char* name, const std::vector<int64_t>& sizes) {
  STD_TORCH_CHECK(t.is_cpu() && t.scalar_type() == ScalarType::Float && t.is_contiguous() && sizes_of(t) == sizes, "hf_cpu_accel::", op,
                  ": ", name, " must be contiguous float32 of the graph's shape");
  return static_cast<const float*>(t.data_ptr());
}

inline Matrix rows_like(const Tensor& t, const Tensor& x, int64_t rows, int64_t features, const char* op, const char* name, Tensor& keep) {
  STD_TORCH_CHECK(t.is_cpu() && t.scalar_type() == x.scalar_type() && t.dim() == 2 && t.size(0) == rows && t.size(1) == features,
                  "hf_cpu_accel::", op, ": ", name, " must be [", rows, ", ", features, "] in the dtype of x");
  return as_rows(t, keep);
}

inline Matrix dense(const Tensor& t) { return {t.mutable_data_ptr(), t.size(1), is_bf16(t)}; }

inline void check_features(const Tensor& x, const char* op) {
  check_floating(x, op, "x");
  STD_TORCH_CHECK(x.dim() == 2, "hf_cpu_accel::", op, ": x must have two dimensions");
}

}  // namespace hfca
