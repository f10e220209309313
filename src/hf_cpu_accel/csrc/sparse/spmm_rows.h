// The rows of a sparse-dense product: up to eight vectors of sums stay in registers while the edges of a row pass by.
#pragma once
#include "../norm/norm_rows.h"
#include "../simd/unroll.h"
#include "sparse.h"

namespace HFCA_TIER {

// Edges that the rows of x are asked for ahead of their use: enough for the way from memory, few enough to still be in L1 then.
constexpr int64_t edges_ahead = 12;

enum class Weights : int { none, one, heads };  // of an edge

inline bool valid_rows(const hfca::Csr& graph, int64_t begin, int64_t end) {
  const int32_t* rowptr = graph.rowptr;
  bool ordered = rowptr[begin] >= 0 && rowptr[end] <= graph.edges;
  for (int64_t row = begin; row < end; ++row) ordered &= rowptr[row] <= rowptr[row + 1];
  if (!ordered) return false;
  if (!graph.col) return rowptr[end] <= graph.sources;
  uint32_t largest = 0;  // negative numbers are large ones
  for (int64_t e = rowptr[begin]; e < rowptr[end]; ++e) {
    const uint32_t source = static_cast<uint32_t>(graph.col[e]);
    largest = source > largest ? source : largest;
  }
  return rowptr[begin] == rowptr[end] || static_cast<int64_t>(largest) < graph.sources;
}

template <bool bf16>
HFCA_INLINE inline const char* row_at(const hfca::Matrix& x, int64_t row, int64_t column) {
  return static_cast<const char*>(x.data) + (row * x.stride + column) * (bf16 ? 2 : 4);
}

// What all vectors of a block at `column` need to know: the lanes of the last one, and where the weights of each vector's head lie.
template <int vectors>
struct Block {
  int64_t column;
  int last_lanes;
  int64_t head[vectors];

  Block(int64_t first, int64_t end, int64_t head_features, int64_t value_head) : column(first) {
    const int64_t rest = end - first - (vectors - 1) * Simd::width;
    last_lanes = static_cast<int>(rest < Simd::width ? rest : Simd::width);
    for (int v = 0; v < vectors; ++v) head[v] = (first + v * Simd::width) / head_features * value_head;
  }
  int lanes(int v) const { return v == vectors - 1 ? last_lanes : Simd::width; }
};

template <bool bf16, int vectors>
HFCA_INLINE inline void prefetch_row(const hfca::Spmm& s, int64_t edge, int64_t column) {
  if (edge >= s.graph.edges) return;
  const char* p = row_at<bf16>(s.x, s.graph.source(edge), column);
  constexpr int bytes = vectors * Simd::width * (bf16 ? 2 : 4);
  unroll<0, (bytes + 63) / 64>([&](auto line) HFCA_INLINE { __builtin_prefetch(p + line * 64); });
}

// The reduction over edges [begin, end) of a block of features, handed to finish(vector, sum, ties).
template <bool bf16, Weights weights, bool extreme, bool ties, int vectors, class Finish>
HFCA_INLINE inline void reduce_block(const hfca::Spmm& s, int64_t begin, int64_t end, const Block<vectors>& block, const Finish& finish) {
  Float sum[vectors], tied[vectors];
  const Float zero = Simd::zero(), one = Simd::set1(1.0f);
  // The minimum is the maximum of the negated products.
  const float sign = extreme && s.reduce == hfca::Reduce::min ? -1.0f : 1.0f;
  const Float signs = Simd::set1(sign);
  unroll<0, vectors>([&](auto v) HFCA_INLINE {
    sum[v] = extreme ? Simd::set1(-__builtin_inff()) : zero;
    if constexpr (ties) tied[v] = zero;
  });
  const float* value = s.value + (weights == Weights::none ? 0 : block.head[0]);
  for (int64_t e = begin; e < end; ++e) {
    prefetch_row<bf16, vectors>(s, e + edges_ahead, block.column);
    const char* x = row_at<bf16>(s.x, s.graph.source(e), block.column);
    Float weight = signs;
    if constexpr (weights == Weights::one) weight = Simd::set1(value[e * s.value_edge] * sign);
    unroll<0, vectors>([&](auto v) HFCA_INLINE {
      const Float xs = load_columns<bf16>(x, v * Simd::width, block.lanes(v));
      if constexpr (weights == Weights::heads) weight = Simd::set1(s.value[e * s.value_edge + block.head[v]]);
      if constexpr (extreme) {
        const Float product = Simd::mul(xs, weight), before = sum[v];
        const Float larger = Simd::max(before, product);
        sum[v] = Simd::where_equal(before, before, larger, before);  // NaN stays
        if constexpr (ties)
          tied[v] = Simd::add(Simd::where_equal(sum[v], before, tied[v], zero), Simd::where_equal(sum[v], product, one, zero));
      } else if constexpr (weights == Weights::none) {
        sum[v] = Simd::add(sum[v], xs);
      } else {
        sum[v] = Simd::fma(xs, weight, sum[v]);
      }
    });
  }
  unroll<0, vectors>([&](auto v) HFCA_INLINE { finish(v, extreme ? Simd::mul(sum[v], signs) : sum[v], ties ? tied[v] : zero); });
}

// A block of a row, with mean, addend and bias; or of a part of a shared row, which goes to where the parts are added up.
template <bool bf16, Weights weights, bool extreme, bool ties, int vectors>
inline void spmm_block(const hfca::Spmm& s, int64_t row, const hfca::RowPart* part, const Block<vectors>& block) {
  const int64_t begin = part ? part->begin : s.graph.rowptr[row], end = part ? part->end : s.graph.rowptr[row + 1], degree = end - begin;
  reduce_block<bf16, weights, extreme, ties, vectors>(s, begin, end, block, [&](auto v, Float sum, Float tied) HFCA_INLINE {
    const int64_t column = block.column + v * Simd::width;
    const int lanes = block.lanes(v);
    if constexpr (ties) {
      if (part) store_columns<false>(part->ties, column, lanes, tied);
      else store_columns<false>(s.ties + row * s.features, column, lanes, Simd::max(tied, Simd::set1(1.0f)));
    }
    if (part) return store_columns<false>(part->sums, column, lanes, sum);
    if (extreme && degree == 0) sum = Simd::zero();
    if (s.reduce == hfca::Reduce::mean && degree > 1) sum = Simd::div(sum, Simd::set1(static_cast<float>(degree)));
    if (s.addend.data) sum = Simd::fma(load_columns<bf16>(row_of(s.addend, row), column, lanes), Simd::set1(s.addend_scale), sum);
    if (s.bias) sum = Simd::add(sum, load_columns<false>(s.bias, column, lanes));
    store_columns<bf16>(row_of(s.output, row), column, lanes, sum);
  });
}

// f(Block<vectors>) for blocks that cover columns [first, last).
template <int most, class F>
HFCA_INLINE inline void for_blocks(const hfca::Spmm& s, int64_t first, int64_t last, const F& f) {
  const int64_t head_features = s.features / s.heads;
  for (int64_t column = first; column < last;) {
    const int64_t vectors = (last - column + Simd::width - 1) / Simd::width;
    const auto run = [&](auto count) HFCA_INLINE {
      f(Block<count>(column, last, head_features, s.value_head));
      column += count * Simd::width;
    };
    if (most >= 8 && vectors >= 8) run(Index<most>{});
    else if (vectors >= 4) run(Index<4>{});
    else if (vectors == 3) run(Index<3>{});
    else if (vectors == 2) run(Index<2>{});
    else run(Index<1>{});
  }
}

// f(first, last) for the columns within which vectors do not straddle heads.
template <class F>
HFCA_INLINE inline void for_heads(const hfca::Spmm& s, bool straddle, int64_t first, int64_t last, const F& f) {
  if (!straddle) return f(first, last);
  const int64_t head_features = s.features / s.heads;
  for (int64_t column = first; column < last;) {
    const int64_t end = (column / head_features + 1) * head_features;
    f(column, end < last ? end : last);
    column = end;
  }
}

template <bool bf16, Weights weights, bool extreme, bool ties>
struct SpmmRows {
  static constexpr int most = ties ? 4 : 8;  // ties need registers of their own

  __attribute__((noinline)) static void rows(const hfca::Spmm& s, bool straddle, int64_t begin, int64_t end, int64_t first, int64_t last,
                                             const hfca::RowPart* part) {
    for_heads(s, straddle, first, last, [&](int64_t from, int64_t to) {
      for (int64_t row = begin; row < end; ++row)
        for_blocks<most>(s, from, to,
                         [&](const auto& block) HFCA_INLINE { spmm_block<bf16, weights, extreme, ties>(s, row, part, block); });
    });
  }
};

// f(SpmmRows<...>{}, straddle) for what `s` asks for.
template <class F>
inline void dispatch_spmm(const hfca::Spmm& s, const F& f) {
  const bool extreme = s.reduce == hfca::Reduce::min || s.reduce == hfca::Reduce::max;
  const bool heads = s.value && s.heads > 1, straddle = heads && (extreme || s.features / s.heads % Simd::width != 0);
  const auto with_type = [&](auto bf16) {
    const auto with_weights = [&](auto weights) {
      constexpr Weights w = static_cast<Weights>(static_cast<int>(weights));
      constexpr bool narrow = bf16 != 0;
      if constexpr (w == Weights::heads) return f(SpmmRows<narrow, w, false, false>{}, straddle);
      else if (!extreme) return f(SpmmRows<narrow, w, false, false>{}, straddle);
      else if (s.ties) return f(SpmmRows<narrow, w, true, true>{}, straddle);
      else return f(SpmmRows<narrow, w, true, false>{}, straddle);
    };
    if (!s.value) with_weights(Index<static_cast<int>(Weights::none)>{});
    else if (heads && !straddle) with_weights(Index<static_cast<int>(Weights::heads)>{});
    else with_weights(Index<static_cast<int>(Weights::one)>{});
  };
  s.x.bf16 ? with_type(Index<1>{}) : with_type(Index<0>{});
}

inline void spmm_rows(const hfca::Spmm& s, int64_t begin, int64_t end, int64_t first, int64_t last) {
  dispatch_spmm(s, [&](auto kernel, bool straddle) { kernel.rows(s, straddle, begin, end, first, last, nullptr); });
}

inline void finish_row(const hfca::Spmm& s, int64_t row, const float* sums) {
  const auto finish = [&](auto bf16) {
    constexpr bool narrow = bf16 != 0;
    for (int64_t k = 0; k < s.features; k += Simd::width) {
      const int lanes = static_cast<int>(s.features - k < Simd::width ? s.features - k : Simd::width);
      Float sum = load_columns<false>(sums, k, lanes);
      if (s.addend.data) sum = Simd::fma(load_columns<narrow>(row_of(s.addend, row), k, lanes), Simd::set1(s.addend_scale), sum);
      if (s.bias) sum = Simd::add(sum, load_columns<false>(s.bias, k, lanes));
      store_columns<narrow>(row_of(s.output, row), k, lanes, sum);
    }
  };
  s.x.bf16 ? finish(Index<1>{}) : finish(Index<0>{});
}

inline void spmm_part(const hfca::Spmm& s, const hfca::RowPart& part, int64_t first, int64_t last) {
  dispatch_spmm(s, [&](auto kernel, bool straddle) { kernel.rows(s, straddle, part.row, part.row + 1, first, last, &part); });
}

}  // namespace HFCA_TIER
