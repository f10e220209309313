// What a tier's sparse kernels offer and what they are given: plain data, no torch.
//
// A graph is a matrix in compressed sparse rows (CSR): row i is a target node, and its entries [rowptr[i], rowptr[i + 1]) are the edges
// that point to it, col[e] being the source node of edge e. What the kernels gather are whole rows of x, which is why they live from
// prefetching: an edge costs one cache line per 16 float32, in an order that no hardware prefetcher foresees.
#pragma once
#include <cstdint>

#include "../gemm/gemm.h"

namespace hfca {

struct Csr {
  const int32_t* rowptr = nullptr;
  const int32_t* col = nullptr;  // null: edge e has row e of x to itself
  int64_t rows = 0, edges = 0, sources = 0;

  int64_t source(int64_t edge) const { return col ? col[edge] : edge; }
};

// output[i] = reduce over the edges e of row i of value[e] * x[source(e)], + addend_scale * addend[i] + bias.
// With heads, the features are as many equal groups, each with values of its own.
struct Spmm {
  Csr graph;
  int64_t features = 0, heads = 1;
  Reduce reduce = Reduce::sum;
  Matrix x, addend, output;        // addend.data may be null
  float addend_scale = 1.0f;
  const float* bias = nullptr;     // [features], may be null
  const float* value = nullptr;    // null: ones. Edge e, head h: value[e * value_edge + h * value_head]
  int64_t value_edge = 1, value_head = 0;
  float* ties = nullptr;           // min and max, may be null: [rows][features], how many edges reach the extreme, at least 1
};

// The edges [begin, end) of one row that is shared among threads; their sums (or extremes) go to `sums` and `ties`, both [features].
struct RowPart {
  int64_t row, begin, end;
  float *sums, *ties;
};

// grad_x of min and max. The graph is the transposed one: its rows are the sources, its columns the targets.
//   grad_x[j] = sum over e of value[e] * (value[e] * x[j] == output[col[e]] ? grad[col[e]] : 0),  grad divided by the ties already
struct ExtremeBackward {
  Csr graph;
  int64_t features = 0;
  Matrix x, output, grad, grad_x;
  const float* value = nullptr;
};

// dot[e][h] = <a[i], b[source(e)]> over the features of head h.
struct Sddmm {
  Csr graph;
  int64_t features = 0, heads = 1;
  Matrix a, b;
  float* dot = nullptr;
};

// softmax over the edges of each row and head, of scores [edges][heads].
struct SegmentSoftmax {
  Csr graph;
  int64_t heads = 1;
  const float *scores = nullptr, *grad = nullptr;  // backward: scores are the softmax, grad is that of its output
  float* output = nullptr;
};

// How the edge (i, j) is scored before the softmax over the edges of i.
//   sum    leaky_relu(source_score[j] + target_score[i])                Velickovic et al. 2018, arXiv:1710.10903
//   mlp    <weight, leaky_relu(x[j] + target[i])>                        Brody et al. 2022, arXiv:2105.14491
//   dot    <target[i], key[j]> * scale                                   Shi et al. 2021, arXiv:2009.03509
enum class Score : int { sum = 0, mlp, dot };

// Graph attention: spmm.output[i] = sum over e of softmax(score)[e] * x[source(e)]. spmm.value is the kernel's to set.
struct GraphAttention {
  Spmm spmm;
  Score score = Score::sum;
  const float *source_score = nullptr, *target_score = nullptr;  // [sources][heads], [rows][heads]; the latter may be null
  Matrix target, key;
  const float* weight = nullptr;  // [features]
  float slope = 0.2f, scale = 1.0f;
};

struct SparseKernels {
  bool (*valid)(const Csr&, int64_t begin, int64_t end);  // whether all that rows [begin, end) refer to is there
  void (*spmm_rows)(const Spmm&, int64_t begin, int64_t end, int64_t first_column, int64_t last_column);
  void (*spmm_part)(const Spmm&, const RowPart&, int64_t first_column, int64_t last_column);
  void (*finish_row)(const Spmm&, int64_t row, const float* sums);  // addend, bias and dtype, for rows that were shared
  void (*extreme_backward_rows)(const ExtremeBackward&, int64_t begin, int64_t end);
  void (*sddmm_rows)(const Sddmm&, int64_t begin, int64_t end);
  void (*segment_softmax_rows)(const SegmentSoftmax&, int64_t begin, int64_t end);
  void (*attention_rows)(const GraphAttention&, int64_t begin, int64_t end, float* scratch);  // heads * longest row
};

}  // namespace hfca
