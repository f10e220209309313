// The other sparse kernels, row by row: gradients of extremes and of edge values, and graph attention.
#pragma once
#include "edge_softmax.h"
#include "spmm_rows.h"

namespace HFCA_TIER {

// Edges that their scores are asked for ahead: they are few numbers each, and may be farther from use than the rows of x.
constexpr int64_t scores_ahead = 32;

// See hfca::ExtremeBackward.
template <bool bf16>
inline void typed_extreme_backward_rows(const hfca::ExtremeBackward& b, int64_t begin, int64_t end) {
  constexpr int vectors = 4;
  const auto gathered = [&](const hfca::Matrix& m, int64_t e, int64_t column) { return row_at<bf16>(m, b.graph.col[e], column); };
  for (int64_t row = begin; row < end; ++row) {
    const int64_t first = b.graph.rowptr[row], last = b.graph.rowptr[row + 1];
    for (int64_t column = 0; column < b.features; column += vectors * Simd::width) {
      const auto lanes = [&](int v) {
        const int64_t rest = b.features - column - v * Simd::width;
        return static_cast<int>(rest < 0 ? 0 : rest < Simd::width ? rest : Simd::width);
      };
      Float x[vectors], sum[vectors];
      unroll<0, vectors>([&](auto v) HFCA_INLINE {
        x[v] = lanes(v) ? load_columns<bf16>(row_of(b.x, row), column + v * Simd::width, lanes(v)) : Simd::zero();
        sum[v] = Simd::zero();
      });
      for (int64_t e = first; e < last; ++e) {
        if (e + edges_ahead < b.graph.edges)
          for (int line = 0; line < vectors * Simd::width * (bf16 ? 2 : 4); line += 64) {
            __builtin_prefetch(gathered(b.output, e + edges_ahead, column) + line);
            __builtin_prefetch(gathered(b.grad, e + edges_ahead, column) + line);
          }
        const char *output = gathered(b.output, e, column), *grad = gathered(b.grad, e, column);
        const Float weight = Simd::set1(b.value ? b.value[e] : 1.0f);
        unroll<0, vectors>([&](auto v) HFCA_INLINE {
          if (lanes(v) == 0) return;
          const Float reached = load_columns<bf16>(output, v * Simd::width, lanes(v)),
                      g = load_columns<bf16>(grad, v * Simd::width, lanes(v));
          sum[v] = Simd::fma(weight, Simd::where_equal(Simd::mul(x[v], weight), reached, g, Simd::zero()), sum[v]);
        });
      }
      unroll<0, vectors>([&](auto v) HFCA_INLINE {
        if (lanes(v)) store_columns<bf16>(row_of(b.grad_x, row), column + v * Simd::width, lanes(v), sum[v]);
      });
    }
  }
}

inline void extreme_backward_rows(const hfca::ExtremeBackward& b, int64_t begin, int64_t end) {
  b.x.bf16 ? typed_extreme_backward_rows<true>(b, begin, end) : typed_extreme_backward_rows<false>(b, begin, end);
}

// The sum over features [first, last) of term(feature, lanes).
template <class Term>
HFCA_INLINE inline float sum_features(int64_t first, int64_t last, const Term& term) {
  Float sum = Simd::zero();
  int64_t k = first;
  for (; k + Simd::width <= last; k += Simd::width) sum = Simd::add(sum, term(k, Simd::width));
  if (k < last) {
    const int rest = static_cast<int>(last - k);
    sum = Simd::add(sum, Simd::select_n(term(k, rest), rest, Simd::zero()));
  }
  return Simd::reduce_add(sum);
}

template <bool bf16>
inline void prefetch_gathered(const hfca::Csr& graph, const hfca::Matrix& m, int64_t features, int64_t edge) {
  if (edge >= graph.edges) return;
  const char* p = row_at<bf16>(m, graph.source(edge), 0);
  for (int64_t byte = 0; byte < features * (bf16 ? 2 : 4); byte += 64) __builtin_prefetch(p + byte);
}

template <bool bf16>
inline void typed_sddmm_rows(const hfca::Sddmm& s, int64_t begin, int64_t end) {
  const int64_t head_features = s.features / s.heads;
  for (int64_t row = begin; row < end; ++row) {
    const void* a = row_of(s.a, row);
    for (int64_t e = s.graph.rowptr[row]; e < s.graph.rowptr[row + 1]; ++e) {
      prefetch_gathered<bf16>(s.graph, s.b, s.features, e + edges_ahead);
      const void* b = row_of(s.b, s.graph.source(e));
      for (int64_t h = 0; h < s.heads; ++h)
        s.dot[e * s.heads + h] = sum_features(h * head_features, (h + 1) * head_features, [&](int64_t k, int n) HFCA_INLINE {
          return Simd::mul(load_columns<bf16>(a, k, n), load_columns<bf16>(b, k, n));
        });
    }
  }
}

inline void sddmm_rows(const hfca::Sddmm& s, int64_t begin, int64_t end) {
  s.a.bf16 ? typed_sddmm_rows<true>(s, begin, end) : typed_sddmm_rows<false>(s, begin, end);
}

inline void segment_softmax_rows(const hfca::SegmentSoftmax& s, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const int64_t first = s.graph.rowptr[row] * s.heads, edges = s.graph.rowptr[row + 1] - s.graph.rowptr[row];
    if (s.grad) softmax_backward(s.scores + first, s.grad + first, s.output + first, edges, s.heads);
    else softmax(s.scores + first, s.output + first, edges, s.heads);
  }
}

HFCA_INLINE inline Float leaky(Float x, Float slope) {
  const Float positive = Simd::max(Simd::zero(), x), negative = Simd::min(Simd::zero(), x);
  return Simd::fma(negative, slope, positive);
}

// The scores of a row's edges: scratch[i * heads + h]. They are vectors of heads, since how a sign falls is as good as random: a branch
// on it would cost more than all the rest.
inline void add_scores(const hfca::GraphAttention& g, int64_t row, int64_t first, int64_t degree, float* scratch) {
  const hfca::Csr& graph = g.spmm.graph;
  const int64_t heads = g.spmm.heads;
  const Float slope = Simd::set1(g.slope);
  for (int64_t h = 0; h < heads; h += Simd::width) {
    const int lanes = static_cast<int>(heads - h < Simd::width ? heads - h : Simd::width);
    const Float target = g.target_score ? load_columns<false>(g.target_score, row * heads + h, lanes) : Simd::zero();
    for (int64_t i = 0; i < degree; ++i) {
      const int64_t ahead = first + i + scores_ahead;
      if (ahead < graph.edges) __builtin_prefetch(g.source_score + graph.source(ahead) * heads + h);
      const Float score = Simd::add(load_columns<false>(g.source_score, graph.source(first + i) * heads + h, lanes), target);
      store_columns<false>(scratch, i * heads + h, lanes, leaky(score, slope));
    }
  }
}

template <bool bf16>
inline void score_edges(const hfca::GraphAttention& g, int64_t row, int64_t first, int64_t degree, float* scratch) {
  if (g.score == hfca::Score::sum) return add_scores(g, row, first, degree, scratch);
  const hfca::Csr& graph = g.spmm.graph;
  const int64_t heads = g.spmm.heads, features = g.spmm.features, head_features = features / heads;
  const void* target = row_of(g.target, row);
  const hfca::Matrix& gathered = g.score == hfca::Score::mlp ? g.spmm.x : g.key;
  const Float slope = Simd::set1(g.slope);
  for (int64_t i = 0; i < degree; ++i) {
    prefetch_gathered<bf16>(graph, gathered, features, first + i + edges_ahead);
    const void* source = row_of(gathered, graph.source(first + i));
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t begin = h * head_features, end = begin + head_features;
      scratch[i * heads + h] = g.score == hfca::Score::mlp
                                   ? sum_features(begin, end,
                                                  [&](int64_t k, int n) HFCA_INLINE {
                                                    const Float x =
                                                        Simd::add(load_columns<bf16>(source, k, n), load_columns<bf16>(target, k, n));
                                                    return Simd::mul(load_columns<false>(g.weight, k, n), leaky(x, slope));
                                                  })
                                   : g.scale * sum_features(begin, end, [&](int64_t k, int n) HFCA_INLINE {
                                       return Simd::mul(load_columns<bf16>(source, k, n), load_columns<bf16>(target, k, n));
                                     });
    }
  }
}

inline void attention_rows(const hfca::GraphAttention& g, int64_t begin, int64_t end, float* scratch) {
  hfca::Spmm s = g.spmm;
  s.value = scratch;  // the choice of the kernel depends on whether there is one
  s.value_edge = s.heads, s.value_head = 1;
  dispatch_spmm(s, [&](auto kernel, bool straddle) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t first = s.graph.rowptr[row], degree = s.graph.rowptr[row + 1] - first;
      s.x.bf16 ? score_edges<true>(g, row, first, degree, scratch) : score_edges<false>(g, row, first, degree, scratch);
      softmax(scratch, scratch, degree, s.heads);
      s.value = scratch - first * s.heads;
      kernel.rows(s, straddle, row, row + 1, 0, s.features, nullptr);
    }
  });
}

constexpr hfca::SparseKernels sparse_kernels() {
  return {&valid_rows, &spmm_rows, &spmm_part, &finish_row, &extreme_backward_rows, &sddmm_rows, &segment_softmax_rows, &attention_rows};
}

}  // namespace HFCA_TIER
