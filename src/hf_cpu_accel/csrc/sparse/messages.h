// Messages that are more than a row of x, several reductions of them in one pass, and their gradients: plain data, no torch.
#pragma once
#include "sparse.h"

namespace hfca {

// message(e) = x[source(e)] + target[row] + edge[order(e)], through ReLU if wanted: what the first linear layer of a network on
// cat(x_i, x_j, e_ij) amounts to once it is split in three. The sum is made from left to right wherever it is made, so that gradients
// find the extremes again.
struct Message {
  Csr graph;
  const int32_t* order = nullptr;  // null: entry e has row e of `edge`
  int64_t features = 0;
  Matrix x, target, edge;          // the latter two may be absent
  bool relu = false;

  int64_t edge_row(int64_t entry) const { return order ? order[entry] : entry; }
};

struct MessageReduce {
  Message message;
  int count = 0;
  Aggregate wanted[aggregates];
  Matrix output;          // row i: `count` groups of features
  float* ties = nullptr;  // may be null: row i: how many messages reach the minimum, and how many the maximum

  [[gnu::always_inline]] bool wants(Aggregate a) const {
    for (int i = 0; i < count; ++i)
      if (wanted[i] == a) return true;
    return false;
  }
  [[gnu::always_inline]] bool squares() const { return wants(Aggregate::var) || wants(Aggregate::std); }
  [[gnu::always_inline]] bool extremes() const { return wants(Aggregate::min) || wants(Aggregate::max) || ties; }
};

// The gradient of message m of target i, all in float32:
//   base[i] + slope[i] * m + (m == lowest[i] ? grad_lowest[i] : 0) + (m == highest[i] ? grad_highest[i] : 0),  0 where ReLU cut it off
// Each of these is a group of features in row i of `table`; -1: absent.
struct MessageGradient {
  Message message;
  Matrix table;
  int base = -1, slope = -1, lowest = -1, highest = -1;  // the group after lowest (highest) is grad_lowest (grad_highest)
  int groups = 0;
  Matrix grad_x, grad_target, grad_edge;                 // those that are wanted
};

struct MessageKernels {
  void (*reduce)(const MessageReduce&, int64_t begin, int64_t end);
  void (*write)(const Message&, const Matrix& output, int64_t begin, int64_t end);  // message(e) to row e
  void (*gradient_by_target)(const MessageGradient&, int64_t begin, int64_t end);   // grad_target and grad_edge
  // grad_x. The graph is the transposed one: rows are sources. Messages have no edge part.
  void (*gradient_by_source)(const MessageGradient&, int64_t begin, int64_t end);
};

}  // namespace hfca
