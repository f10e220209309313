// The ops on graphs in compressed sparse rows: schema, checks, call. See ops/sparse.py for what they compute.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <tuple>

#include "../sparse/arguments.h"
#include "../sparse/units.h"

namespace hfca {
namespace {

Reduce reduce_of(const std::string& name, const char* op) {
  const auto known = std::find(std::begin(reduce_names), std::end(reduce_names), name);
  STD_TORCH_CHECK(known != std::end(reduce_names), "hf_cpu_accel::", op, ": reduce must be sum, mean, min or max");
  return static_cast<Reduce>(known - reduce_names);
}

// The values [edges] or [edges, heads] of `s`.
void set_values(Spmm& s, const OptionalTensor& value, const char* op) {
  if (!value) return;
  s.heads = value->dim() == 2 ? value->size(1) : 1;
  STD_TORCH_CHECK(s.heads > 0 && s.features % s.heads == 0, "hf_cpu_accel::", op, ": ", s.features, " features do not divide among ",
                  s.heads, " heads");
  std::vector<int64_t> sizes{s.graph.edges};
  if (value->dim() == 2) sizes.push_back(s.heads);
  s.value = floats(*value, op, "value", sizes);
  s.value_edge = s.heads, s.value_head = 1;
}

std::tuple<Tensor, Tensor> spmm(const char* op, const Tensor& rowptr, const OptionalTensor& col, const OptionalTensor& value,
                                const Tensor& x, const Text& reduce, const OptionalTensor& addend, double addend_scale,
                                const OptionalTensor& bias, bool with_ties) {
  check_features(x, op);
  Spmm s;
  s.graph = csr_of(op, rowptr, col, x.size(0), x.size(0));
  s.features = x.size(1);
  s.reduce = reduce_of(reduce, op);
  set_values(s, value, op);
  Tensor output = empty_of(x, {s.graph.rows, s.features});
  Tensor ties = empty_float32({with_ties ? s.graph.rows : 0, s.features});
  Tensor keep_x = x, keep_addend = x;
  if (addend) s.addend = rows_like(*addend, x, s.graph.rows, s.features, op, "addend", keep_addend);
  s.addend_scale = static_cast<float>(addend_scale);
  if (bias) s.bias = floats(*bias, op, "bias", {s.features});
  if (s.graph.rows == 0 || s.features == 0) {
    check_graph(valid_graph(s.graph), op);
    return {output, ties};
  }
  s.x = as_rows(x, keep_x);
  s.output = dense(output);
  if (with_ties) s.ties = static_cast<float*>(ties.mutable_data_ptr());
  check_graph(run_spmm(s), op);
  return {output, ties};
}

Tensor spmm_reduce(const Tensor& rowptr, const OptionalTensor& col, const OptionalTensor& value, const Tensor& x, const Text& reduce,
                   const OptionalTensor& addend, double addend_scale, const OptionalTensor& bias, const OptionalTensor& /*t_rowptr*/,
                   const OptionalTensor& /*t_col*/, const OptionalTensor& /*t_order*/) {
  return std::get<0>(spmm("spmm_reduce", rowptr, col, value, x, reduce, addend, addend_scale, bias, false));
}

std::tuple<Tensor, Tensor> spmm_extreme(const Tensor& rowptr, const OptionalTensor& col, const OptionalTensor& value, const Tensor& x,
                                        const Text& reduce, const OptionalTensor& /*t_rowptr*/, const OptionalTensor& /*t_col*/,
                                        const OptionalTensor& /*t_order*/) {
  STD_TORCH_CHECK(reduce == "min" || reduce == "max", "hf_cpu_accel::spmm_extreme: reduce must be min or max");
  return spmm("spmm_extreme", rowptr, col, value, x, reduce, std::nullopt, 1.0, std::nullopt, true);
}

Tensor spmm_extreme_backward(const Tensor& t_rowptr, const Tensor& t_col, const OptionalTensor& t_value, const Tensor& x,
                             const Tensor& output, const Tensor& grad) {
  const char* op = "spmm_extreme_backward";
  check_features(x, op);
  ExtremeBackward b;
  b.graph = csr_of(op, t_rowptr, t_col, 0, output.size(0));
  b.features = x.size(1);
  Tensor grad_x = empty_of(x, {b.graph.rows, b.features});
  Tensor keep_x = x, keep_output = x, keep_grad = x;
  b.x = rows_like(x, x, b.graph.rows, b.features, op, "x", keep_x);
  b.output = rows_like(output, x, b.graph.sources, b.features, op, "output", keep_output);
  b.grad = rows_like(grad, x, b.graph.sources, b.features, op, "grad", keep_grad);
  b.grad_x = dense(grad_x);
  if (t_value) b.value = floats(*t_value, op, "value", {b.graph.edges});
  if (grad_x.numel() == 0) {
    check_graph(valid_graph(b.graph), op);
    return grad_x;
  }
  check_graph(
      each_rows(b.graph, b.features, [&](int64_t begin, int64_t end) { dispatch().kernels.sparse.extreme_backward_rows(b, begin, end); }),
      op);
  return grad_x;
}

// Edges that rowptr leaves out get 0.
void clear_rest(const Csr& graph, int64_t heads, float* out) {
  for (int64_t i = std::max<int64_t>(graph.rowptr[graph.rows], 0) * heads; i < graph.edges * heads; ++i) out[i] = 0.0f;
}

Tensor sddmm(const Tensor& rowptr, const OptionalTensor& col, const Tensor& a, const Tensor& b, int64_t heads) {
  check_features(b, "sddmm");
  Sddmm s;
  s.graph = csr_of("sddmm", rowptr, col, b.size(0), b.size(0));
  s.features = b.size(1), s.heads = heads;
  STD_TORCH_CHECK(heads > 0 && s.features % heads == 0, "hf_cpu_accel::sddmm: ", s.features, " features do not divide among ", heads,
                  " heads");
  Tensor dot = empty_float32({s.graph.edges, heads}), keep_a = a, keep_b = b;
  s.a = rows_like(a, b, s.graph.rows, s.features, "sddmm", "a", keep_a);
  s.b = as_rows(b, keep_b);
  s.dot = static_cast<float*>(dot.mutable_data_ptr());
  check_graph(each_rows(s.graph, s.features, [&](int64_t begin, int64_t end) { dispatch().kernels.sparse.sddmm_rows(s, begin, end); }),
              "sddmm");
  clear_rest(s.graph, heads, s.dot);
  return dot;
}

Tensor run_softmax(const char* op, const Tensor& rowptr, const Tensor& scores, const Tensor* grad) {
  STD_TORCH_CHECK(scores.dim() == 2, "hf_cpu_accel::", op, ": scores must be [edges, heads]");
  SegmentSoftmax s;
  s.graph = csr_of(op, rowptr, std::nullopt, scores.size(0), scores.size(0));
  s.heads = scores.size(1);
  s.scores = floats(scores, op, "scores", sizes_of(scores));
  if (grad) s.grad = floats(*grad, op, "grad", sizes_of(scores));
  Tensor output = empty_float32(sizes_of(scores));
  s.output = static_cast<float*>(output.mutable_data_ptr());
  const auto rows = dispatch().kernels.sparse.segment_softmax_rows;
  const bool valid = each_rows(s.graph, 4 * s.heads, [&](int64_t begin, int64_t end) { rows(s, begin, end); });
  check_graph(valid, op);
  clear_rest(s.graph, s.heads, s.output);
  return output;
}

Tensor segment_softmax(const Tensor& rowptr, const Tensor& scores) { return run_softmax("segment_softmax", rowptr, scores, nullptr); }
Tensor segment_softmax_backward(const Tensor& rowptr, const Tensor& softmax, const Tensor& grad) {
  return run_softmax("segment_softmax_backward", rowptr, softmax, &grad);
}

Tensor run_attention(const char* op, GraphAttention& g, const Tensor& rowptr, const Tensor& col, const Tensor& x, int64_t heads) {
  check_features(x, op);
  Spmm& s = g.spmm;
  s.graph = csr_of(op, rowptr, col, 0, x.size(0));
  s.features = x.size(1), s.heads = heads;
  STD_TORCH_CHECK(heads > 0 && s.features % heads == 0, "hf_cpu_accel::", op, ": ", s.features, " features do not divide among ", heads,
                  " heads");
  Tensor output = empty_of(x, {s.graph.rows, s.features}), keep = x;
  s.x = as_rows(x, keep);
  s.output = dense(output);
  if (output.numel() == 0) {
    check_graph(valid_graph(s.graph), op);
    return output;
  }
  const bool valid = each_rows(s.graph, 2 * s.features, [&](int64_t begin, int64_t end) {
    Workspace workspace(Workspace::size_of<float>(heads * longest_row(s.graph, begin, end)));
    dispatch().kernels.sparse.attention_rows(g, begin, end, workspace.take<float>(0));
  });
  check_graph(valid, op);
  return output;
}

Tensor gat(const Tensor& rowptr, const Tensor& col, const Tensor& x, const Tensor& source_score, const OptionalTensor& target_score,
           double slope) {
  STD_TORCH_CHECK(source_score.dim() == 2, "hf_cpu_accel::gat: source_score must be [sources, heads]");
  GraphAttention g;
  const int64_t heads = source_score.size(1);
  g.source_score = floats(source_score, "gat", "source_score", {x.size(0), heads});
  if (target_score) g.target_score = floats(*target_score, "gat", "target_score", {rowptr.size(0) - 1, heads});
  g.slope = static_cast<float>(slope);
  return run_attention("gat", g, rowptr, col, x, heads);
}

Tensor gatv2(const Tensor& rowptr, const Tensor& col, const Tensor& x, const Tensor& target, const Tensor& weight, double slope) {
  STD_TORCH_CHECK(weight.dim() == 2, "hf_cpu_accel::gatv2: weight must be [heads, features of a head]");
  check_features(x, "gatv2");
  GraphAttention g;
  Tensor keep = target;
  g.score = Score::mlp;
  g.target = rows_like(target, x, rowptr.size(0) - 1, x.size(1), "gatv2", "target", keep);
  g.weight = floats(weight, "gatv2", "weight", sizes_of(weight));
  STD_TORCH_CHECK(weight.size(0) * weight.size(1) == x.size(1), "hf_cpu_accel::gatv2: weight must have as many elements as x has features");
  g.slope = static_cast<float>(slope);
  return run_attention("gatv2", g, rowptr, col, x, weight.size(0));
}

Tensor dot_attention(const Tensor& rowptr, const Tensor& col, const Tensor& query, const Tensor& key, const Tensor& value, int64_t heads,
                     double scale) {
  check_features(value, "dot_attention");
  GraphAttention g;
  Tensor keep_query = query, keep_key = key;
  g.score = Score::dot;
  g.target = rows_like(query, value, rowptr.size(0) - 1, value.size(1), "dot_attention", "query", keep_query);
  g.key = rows_like(key, value, value.size(0), value.size(1), "dot_attention", "key", keep_key);
  g.scale = static_cast<float>(scale);
  return run_attention("dot_attention", g, rowptr, col, value, heads);
}

}  // namespace
}  // namespace hfca

HFCA_OP(spmm_reduce,
        "(Tensor rowptr, Tensor? col, Tensor? value, Tensor x, str reduce, Tensor? addend, float addend_scale, Tensor? bias, "
        "Tensor? t_rowptr, Tensor? t_col, Tensor? t_order) -> Tensor")
HFCA_OP(spmm_extreme,
        "(Tensor rowptr, Tensor? col, Tensor? value, Tensor x, str reduce, Tensor? t_rowptr, Tensor? t_col, Tensor? t_order) -> (Tensor, "
        "Tensor)")
HFCA_OP(spmm_extreme_backward, "(Tensor t_rowptr, Tensor t_col, Tensor? t_value, Tensor x, Tensor output, Tensor grad) -> Tensor")
HFCA_OP(sddmm, "(Tensor rowptr, Tensor? col, Tensor a, Tensor b, SymInt heads) -> Tensor")
HFCA_OP(segment_softmax, "(Tensor rowptr, Tensor scores) -> Tensor")
HFCA_OP(segment_softmax_backward, "(Tensor rowptr, Tensor softmax, Tensor grad) -> Tensor")
HFCA_OP(gat, "(Tensor rowptr, Tensor col, Tensor x, Tensor source_score, Tensor? target_score, float slope) -> Tensor")
HFCA_OP(gatv2, "(Tensor rowptr, Tensor col, Tensor x, Tensor target, Tensor weight, float slope) -> Tensor")
HFCA_OP(dot_attention, "(Tensor rowptr, Tensor col, Tensor query, Tensor key, Tensor value, SymInt heads, float scale) -> Tensor")
