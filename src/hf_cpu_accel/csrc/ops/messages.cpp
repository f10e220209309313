// The ops on messages of several parts: schema, checks, call. See ops/messages/ for what they compute.
#include <iterator>
#include <tuple>

#include "../sparse/arguments.h"
#include "../sparse/units.h"

namespace hfca {
namespace {

// The tensors that a view points into, where they had to be made contiguous.
struct MessageMemory {
  Tensor x, target, edge;
  explicit MessageMemory(const Tensor& t) : x(t), target(t), edge(t) {}
};

// `own`: how many rows of x, where entry e does not say which (there is no col).
Message message_of(const char* op, const Tensor& rowptr, const OptionalTensor& col, const OptionalTensor& order, const Tensor& x,
                   const OptionalTensor& target, const OptionalTensor& edge, bool relu, MessageMemory& keep) {
  check_features(x, op);
  Message m;
  m.graph = csr_of(op, rowptr, col, x.size(0), x.size(0));
  m.features = x.size(1);
  m.x = as_rows(x, keep.x);
  m.relu = relu;
  if (target) m.target = rows_like(*target, x, m.graph.rows, m.features, op, "target", keep.target);
  if (!edge) return m;
  m.edge = rows_like(*edge, x, edge->size(0), m.features, op, "edge", keep.edge);
  if (order) m.order = indices(*order, op, "order");
  STD_TORCH_CHECK(order ? order->size(0) == m.graph.edges : edge->size(0) >= m.graph.edges, "hf_cpu_accel::", op,
                  ": order must be as long as col, and without it edge must have a row for each entry");
  return m;
}

// Whether the rows of `edge` that rows [begin, end) refer to are there. To be asked once rowptr was found to be in order.
bool valid_order(const Message& m, int64_t edge_rows, int64_t begin, int64_t end) {
  if (!m.order) return true;
  const Csr edges{m.graph.rowptr, m.order, m.graph.rows, m.graph.edges, edge_rows};
  return dispatch().kernels.sparse.valid(edges, begin, end);
}

template <class F>
void each_target(const char* op, const Message& m, const OptionalTensor& edge, int64_t features, const F& f) {
  std::atomic<bool> valid{true};
  const int64_t edge_rows = edge ? edge->size(0) : 0;
  const bool inside = each_rows(m.graph, features, [&](int64_t begin, int64_t end) {
    if (!valid_order(m, edge_rows, begin, end)) return valid.store(false, std::memory_order_relaxed);
    f(begin, end);
  });
  check_graph(inside && valid.load(), op);
}

// The names in "sum,max", as numbers of `names`.
std::vector<int> parse(const std::string& list, const std::vector<std::string>& names, const char* op) {
  std::vector<int> found;
  for (size_t begin = 0; !list.empty() && begin <= list.size();) {
    const size_t end = std::min(list.find(',', begin), list.size());
    const auto known = std::find(names.begin(), names.end(), list.substr(begin, end - begin));
    STD_TORCH_CHECK(known != names.end(), "hf_cpu_accel::", op, ": unknown name in '", list, "'");
    found.push_back(static_cast<int>(known - names.begin()));
    begin = end + 1;
  }
  return found;
}

std::tuple<Tensor, Tensor> message_reduce(const Tensor& rowptr, const OptionalTensor& col, const OptionalTensor& order, const Tensor& x,
                                          const OptionalTensor& target, const OptionalTensor& edge, bool relu, const Text& reduces,
                                          bool with_ties, const OptionalTensor& /*t_rowptr*/, const OptionalTensor& /*t_col*/,
                                          const OptionalTensor& /*t_order*/) {
  const char* op = "message_reduce";
  MessageMemory keep(x);
  MessageReduce r;
  r.message = message_of(op, rowptr, col, order, x, target, edge, relu, keep);
  const std::vector<int> wanted = parse(reduces, {std::begin(aggregate_names), std::end(aggregate_names)}, op);
  STD_TORCH_CHECK(!wanted.empty() && wanted.size() <= aggregates, "hf_cpu_accel::message_reduce: one to six reductions");
  for (int w : wanted) r.wanted[r.count++] = static_cast<Aggregate>(w);
  Tensor output = empty_of(x, {r.message.graph.rows, r.count * r.message.features});
  Tensor ties = empty_float32({with_ties ? r.message.graph.rows : 0, 2 * r.message.features});
  if (output.numel() == 0) {
    check_graph(valid_graph(r.message.graph) && valid_order(r.message, edge ? edge->size(0) : 0, 0, r.message.graph.rows), op);
    return {output, ties};
  }
  r.output = dense(output);
  if (with_ties) r.ties = static_cast<float*>(ties.mutable_data_ptr());
  each_target(op, r.message, edge, r.message.features,
              [&](int64_t begin, int64_t end) { dispatch().kernels.messages.reduce(r, begin, end); });
  return {output, ties};
}

Tensor edge_messages(const Tensor& rowptr, const OptionalTensor& col, const OptionalTensor& order, const Tensor& x,
                     const OptionalTensor& target, const OptionalTensor& edge, bool relu, const OptionalTensor& /*t_rowptr*/,
                     const OptionalTensor& /*t_col*/, const OptionalTensor& /*t_order*/) {
  const char* op = "edge_messages";
  MessageMemory keep(x);
  const Message m = message_of(op, rowptr, col, order, x, target, edge, relu, keep);
  Tensor output = empty_of(x, {m.graph.edges, m.features});
  if (output.numel() == 0) {
    check_graph(valid_graph(m.graph) && valid_order(m, edge ? edge->size(0) : 0, 0, m.graph.rows), op);
    return output;
  }
  const Matrix rows = dense(output);
  each_target(op, m, edge, m.features, [&](int64_t begin, int64_t end) { dispatch().kernels.messages.write(m, rows, begin, end); });
  const int64_t element = static_cast<int64_t>(output.element_size()), used = std::max<int64_t>(m.graph.rowptr[m.graph.rows], 0);
  std::memset(static_cast<char*>(output.mutable_data_ptr()) + used * m.features * element, 0,
              static_cast<size_t>((m.graph.edges - used) * m.features * element));
  return output;
}

// The groups of the table, in the order of `groups`: "base,slope,min,max" without those that are absent.
void set_table(MessageGradient& g, const Tensor& table, const std::string& groups, int64_t targets, const char* op, Tensor& keep) {
  for (int group : parse(groups, {"base", "slope", "min", "max"}, op)) {
    int* const places[] = {&g.base, &g.slope, &g.lowest, &g.highest};
    *places[group] = g.groups;
    g.groups += group < 2 ? 1 : 2;
  }
  STD_TORCH_CHECK(!g.message.x.bf16, "hf_cpu_accel::", op, ": gradients are computed in float32");
  check_floating(table, op, "table");
  STD_TORCH_CHECK(!is_bf16(table) && table.dim() == 2 && table.size(0) == targets && table.size(1) == g.groups * g.message.features,
                  "hf_cpu_accel::", op, ": table must be float32 [targets, groups * features]");
  g.table = as_rows(table, keep);
}

std::tuple<Tensor, Tensor> message_grad_edges(const Tensor& rowptr, const OptionalTensor& col, const OptionalTensor& order, const Tensor& x,
                                              const OptionalTensor& target, const OptionalTensor& edge, bool relu, const Tensor& table,
                                              const Text& groups, bool with_target, bool with_edge) {
  const char* op = "message_grad_edges";
  MessageMemory keep(x);
  Tensor keep_table = table;
  MessageGradient g;
  g.message = message_of(op, rowptr, col, order, x, target, edge, relu, keep);
  set_table(g, table, groups, g.message.graph.rows, op, keep_table);
  STD_TORCH_CHECK(!with_edge || edge || !col, "hf_cpu_accel::message_grad_edges: there is nothing that each edge has a row of");
  const int64_t edge_rows = (edge ? *edge : x).size(0);
  Tensor grad_target = empty_of(x, {with_target ? g.message.graph.rows : 0, g.message.features});
  Tensor grad_edge = empty_of(x, {with_edge ? edge_rows : 0, g.message.features});
  if (grad_target.numel() + grad_edge.numel() == 0) {
    check_graph(valid_graph(g.message.graph) && valid_order(g.message, edge_rows, 0, g.message.graph.rows), op);
    return {grad_target, grad_edge};
  }
  if (with_target) g.grad_target = dense(grad_target);
  if (with_edge) {
    g.grad_edge = dense(grad_edge);
    if (edge_rows != g.message.graph.rowptr[g.message.graph.rows])  // some edges are in no row
      std::memset(grad_edge.mutable_data_ptr(), 0, static_cast<size_t>(grad_edge.numel()) * sizeof(float));
  }
  each_target(op, g.message, edge, 2 * g.message.features,
              [&](int64_t begin, int64_t end) { dispatch().kernels.messages.gradient_by_target(g, begin, end); });
  return {grad_target, grad_edge};
}

Tensor message_grad_sources(const Tensor& t_rowptr, const Tensor& t_col, const Tensor& x, const OptionalTensor& target, bool relu,
                            const Tensor& table, const Text& groups) {
  const char* op = "message_grad_sources";
  check_features(x, op);
  STD_TORCH_CHECK(table.dim() == 2, "hf_cpu_accel::message_grad_sources: table must have two dimensions");
  const int64_t targets = table.size(0);
  MessageMemory keep(x);
  Tensor keep_table = table;
  MessageGradient g;
  g.message.graph = csr_of(op, t_rowptr, t_col, 0, targets);
  g.message.features = x.size(1);
  g.message.relu = relu;
  g.message.x = rows_like(x, x, g.message.graph.rows, x.size(1), op, "x", keep.x);
  if (target) g.message.target = rows_like(*target, x, targets, x.size(1), op, "target", keep.target);
  set_table(g, table, groups, targets, op, keep_table);
  Tensor grad_x = empty_of(x, {g.message.graph.rows, g.message.features});
  if (grad_x.numel() == 0) {
    check_graph(valid_graph(g.message.graph), op);
    return grad_x;
  }
  g.grad_x = dense(grad_x);
  const auto kernel = dispatch().kernels.messages.gradient_by_source;
  check_graph(each_rows(g.message.graph, g.groups * g.message.features, [&](int64_t begin, int64_t end) { kernel(g, begin, end); }), op);
  return grad_x;
}

}  // namespace
}  // namespace hfca

HFCA_OP(message_reduce,
        "(Tensor rowptr, Tensor? col, Tensor? order, Tensor x, Tensor? target, Tensor? edge, bool relu, str reduces, bool ties, "
        "Tensor? t_rowptr, Tensor? t_col, Tensor? t_order) -> (Tensor, Tensor)")
HFCA_OP(edge_messages,
        "(Tensor rowptr, Tensor? col, Tensor? order, Tensor x, Tensor? target, Tensor? edge, bool relu, Tensor? t_rowptr, Tensor? t_col, "
        "Tensor? t_order) -> Tensor")
HFCA_OP(message_grad_edges,
        "(Tensor rowptr, Tensor? col, Tensor? order, Tensor x, Tensor? target, Tensor? edge, bool relu, Tensor table, str groups, "
        "bool with_target, bool with_edge) -> (Tensor, Tensor)")
HFCA_OP(message_grad_sources, "(Tensor t_rowptr, Tensor t_col, Tensor x, Tensor? target, bool relu, Tensor table, str groups) -> Tensor")
