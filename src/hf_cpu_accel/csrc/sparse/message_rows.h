// The rows of MessageReduce and of its gradients: a few vectors of every aggregate stay in registers while the messages of a row pass by.
#pragma once
#include <type_traits>

#include "messages.h"
#include "spmm_rows.h"

namespace HFCA_TIER {

// Six accumulators per vector of features.
constexpr int message_vectors = Simd::registers >= 32 ? 4 : 2;

template <int vectors>
struct Columns {
  static constexpr int count = vectors;
  int64_t column;
  int last_lanes;

  int lanes(int v) const { return v == vectors - 1 ? last_lanes : Simd::width; }
};

// f(Columns) for blocks that cover all features.
template <class F>
HFCA_INLINE inline void for_message_blocks(int64_t features, const F& f) {
  for (int64_t column = 0; column < features;) {
    const int64_t vectors = (features - column + Simd::width - 1) / Simd::width;
    const auto run = [&](auto count) HFCA_INLINE {
      const int64_t rest = features - column - (count - 1) * Simd::width;
      f(Columns<count>{column, static_cast<int>(rest < Simd::width ? rest : Simd::width)});
      column += count * Simd::width;
    };
    if (message_vectors >= 4 && vectors >= 4) run(Index<message_vectors>{});
    else if (vectors >= 2) run(Index<2>{});
    else run(Index<1>{});
  }
}

// The rows that entry e needs, all features of them: blocks after the first find them in the caches.
template <bool bf16>
HFCA_INLINE inline void prefetch_message(const hfca::Message& m, int64_t e) {
  if (e >= m.graph.edges) return;
  const int64_t bytes = m.features * (bf16 ? 2 : 4);
  const char* x = row_at<bf16>(m.x, m.graph.source(e), 0);
  for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(x + byte);
  if (!m.edge.data) return;
  const char* edge = row_at<bf16>(m.edge, m.edge_row(e), 0);
  for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(edge + byte);
}

// What all messages of a row share. `parts`: whether there is more to a message than the row of x.
template <bool bf16, bool parts, int vectors>
struct MessageBlock {
  const hfca::Message& m;
  const Columns<vectors>& block;
  Float target[vectors];

  MessageBlock(const hfca::Message& message, int64_t row, const Columns<vectors>& b) : m(message), block(b) {
    unroll<0, vectors>([&](auto v) HFCA_INLINE {
      target[v] =
          parts && m.target.data ? load_columns<bf16>(row_of(m.target, row), block.column + v * Simd::width, block.lanes(v)) : Simd::zero();
    });
  }

  // f(vector, message) of entry e.
  template <class F>
  HFCA_INLINE void each(int64_t e, const F& f) const {
    const char* x = row_at<bf16>(m.x, m.graph.source(e), block.column);
    const char* edge = parts && m.edge.data ? row_at<bf16>(m.edge, m.edge_row(e), block.column) : nullptr;
    unroll<0, vectors>([&](auto v) HFCA_INLINE {
      Float message = load_columns<bf16>(x, v * Simd::width, block.lanes(v));
      if constexpr (parts) {
        message = Simd::add(message, target[v]);
        if (edge) message = Simd::add(message, load_columns<bf16>(edge, v * Simd::width, block.lanes(v)));
        if (m.relu) message = Simd::max(Simd::zero(), message);
      }
      f(v, message);
    });
  }
};

inline Float root_or_zero(Float var) {
  float lanes[Simd::width];
  Simd::store(lanes, var);
  for (float& x : lanes) x = x <= 1e-5f ? 0.0f : __builtin_sqrtf(x);
  return Simd::load(lanes);
}

template <bool bf16, bool parts, bool squares, bool extremes, int vectors>
inline void reduce_messages(const hfca::MessageReduce& r, int64_t row, const Columns<vectors>& block) {
  const hfca::Message& m = r.message;
  const int64_t begin = m.graph.rowptr[row], end = m.graph.rowptr[row + 1];
  const MessageBlock<bf16, parts, vectors> messages(m, row, block);
  Float sum[vectors], shift[vectors], moved[vectors], square[vectors], low[vectors], high[vectors];
  const Float zero = Simd::zero(), one = Simd::set1(1.0f);
  unroll<0, vectors>([&](auto v) HFCA_INLINE {
    sum[v] = zero;
    if constexpr (squares) shift[v] = moved[v] = square[v] = zero;
    if constexpr (extremes) low[v] = Simd::set1(__builtin_inff()), high[v] = Simd::set1(-__builtin_inff());
  });
  // Squares are of the distance to the row's first message: what many have in common would drown their differences.
  if constexpr (squares)
    if (begin < end) messages.each(begin, [&](auto v, Float message) HFCA_INLINE { shift[v] = message; });
  for (int64_t e = begin; e < end; ++e) {
    if (block.column == 0) prefetch_message<bf16>(m, e + edges_ahead);
    messages.each(e, [&](auto v, Float message) HFCA_INLINE {
      sum[v] = Simd::add(sum[v], message);
      if constexpr (squares) {
        const Float distance = Simd::sub(message, shift[v]);
        moved[v] = Simd::add(moved[v], distance);
        square[v] = Simd::fma(distance, distance, square[v]);
      }
      if constexpr (extremes) {  // NaN stays
        low[v] = Simd::where_equal(low[v], low[v], Simd::min(low[v], message), low[v]);
        high[v] = Simd::where_equal(high[v], high[v], Simd::max(high[v], message), high[v]);
      }
    });
  }
  const Float inverse = Simd::set1(begin < end ? 1.0f / static_cast<float>(end - begin) : 0.0f);
  unroll<0, vectors>([&](auto v) HFCA_INLINE {
    const int64_t column = block.column + v * Simd::width;
    Float var = zero;
    if constexpr (squares) {
      const Float mean = Simd::mul(moved[v], inverse);
      var = Simd::fnma(mean, mean, Simd::mul(square[v], inverse));
    }
    if constexpr (extremes)
      if (begin == end) low[v] = high[v] = zero;
    for (int i = 0; i < r.count; ++i) {
      const auto value = [&]() HFCA_INLINE {
        switch (r.wanted[i]) {
          case hfca::Aggregate::sum: return sum[v];
          case hfca::Aggregate::mean: return Simd::mul(sum[v], inverse);
          case hfca::Aggregate::min: return extremes ? low[v] : zero;
          case hfca::Aggregate::max: return extremes ? high[v] : zero;
          case hfca::Aggregate::var: return var;
          default: return root_or_zero(var);
        }
      };
      store_columns<bf16>(row_of(r.output, row), i * m.features + column, block.lanes(v), value());
    }
  });
  if constexpr (extremes) {
    if (!r.ties) return;
    Float lows[vectors], highs[vectors];
    unroll<0, vectors>([&](auto v) HFCA_INLINE { lows[v] = highs[v] = zero; });
    for (int64_t e = begin; e < end; ++e)  // the rows are in the caches now
      messages.each(e, [&](auto v, Float message) HFCA_INLINE {
        lows[v] = Simd::add(lows[v], Simd::where_equal(message, low[v], one, zero));
        highs[v] = Simd::add(highs[v], Simd::where_equal(message, high[v], one, zero));
      });
    float* ties = r.ties + row * 2 * m.features;
    unroll<0, vectors>([&](auto v) HFCA_INLINE {
      const int64_t column = block.column + v * Simd::width;
      store_columns<false>(ties, column, block.lanes(v), lows[v]);
      store_columns<false>(ties, m.features + column, block.lanes(v), highs[v]);
    });
  }
}

template <bool bf16, bool parts, bool squares, bool extremes>
__attribute__((noinline)) inline void typed_message_rows(const hfca::MessageReduce& r, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row)
    for_message_blocks(r.message.features,
                       [&](const auto& block) HFCA_INLINE { reduce_messages<bf16, parts, squares, extremes>(r, row, block); });
}

// f(Index<0 or 1>) for a choice that is made at run time.
template <class F>
HFCA_INLINE inline void choose(bool yes, const F& f) {
  yes ? f(Index<1>{}) : f(Index<0>{});
}

inline bool has_parts(const hfca::Message& m) { return m.target.data || m.edge.data || m.relu; }

inline void message_rows(const hfca::MessageReduce& r, int64_t begin, int64_t end) {
  choose(r.message.x.bf16, [&](auto bf16) {
    choose(has_parts(r.message), [&](auto parts) {
      choose(r.squares(), [&](auto squares) {
        choose(r.extremes(), [&](auto extremes) { typed_message_rows<bf16, parts, squares, extremes>(r, begin, end); });
      });
    });
  });
}

inline void write_messages(const hfca::Message& m, const hfca::Matrix& output, int64_t begin, int64_t end) {
  choose(m.x.bf16, [&](auto bf16) {
    constexpr bool narrow = bf16 != 0;
    for (int64_t row = begin; row < end; ++row)
      for_message_blocks(m.features, [&](const auto& block) HFCA_INLINE {
        const MessageBlock<narrow, true, std::decay_t<decltype(block)>::count> messages(m, row, block);
        for (int64_t e = m.graph.rowptr[row]; e < m.graph.rowptr[row + 1]; ++e) {
          if (block.column == 0) prefetch_message<narrow>(m, e + edges_ahead);
          messages.each(e, [&](auto v, Float message) HFCA_INLINE {
            store_columns<narrow>(row_of(output, e), block.column + v * Simd::width, block.lanes(v), message);
          });
        }
      });
  });
}

// One group of features of a row of the table.
HFCA_INLINE inline Float table_group(const hfca::MessageGradient& g, const float* row, int group, int64_t column, int lanes) {
  return load_columns<false>(row, group * g.message.features + column, lanes);
}

// See hfca::MessageGradient. `row` is the target's row of the table.
HFCA_INLINE inline Float message_gradient(const hfca::MessageGradient& g, const float* row, Float message, int64_t column, int lanes) {
  const Float zero = Simd::zero();
  Float grad = g.base >= 0 ? table_group(g, row, g.base, column, lanes) : zero;
  if (g.slope >= 0) grad = Simd::fma(table_group(g, row, g.slope, column, lanes), message, grad);
  const auto share = [&](int group) HFCA_INLINE {
    if (group < 0) return;
    const Float extreme = table_group(g, row, group, column, lanes);
    grad = Simd::add(grad, Simd::where_equal(message, extreme, table_group(g, row, group + 1, column, lanes), zero));
  };
  share(g.lowest);
  share(g.highest);
  return g.message.relu ? Simd::where_equal(message, zero, zero, grad) : grad;
}

inline const float* table_row(const hfca::MessageGradient& g, int64_t row) { return static_cast<const float*>(row_of(g.table, row)); }

inline void gradient_by_target(const hfca::MessageGradient& g, int64_t begin, int64_t end) {
  const hfca::Message& m = g.message;
  for (int64_t row = begin; row < end; ++row)
    for_message_blocks(m.features, [&](const auto& block) HFCA_INLINE {
      constexpr int vectors = std::decay_t<decltype(block)>::count;
      const MessageBlock<false, true, vectors> messages(m, row, block);
      Float sum[vectors];
      unroll<0, vectors>([&](auto v) HFCA_INLINE { sum[v] = Simd::zero(); });
      for (int64_t e = m.graph.rowptr[row]; e < m.graph.rowptr[row + 1]; ++e) {
        if (block.column == 0) prefetch_message<false>(m, e + edges_ahead);
        messages.each(e, [&](auto v, Float message) HFCA_INLINE {
          const int64_t column = block.column + v * Simd::width;
          const Float grad = message_gradient(g, table_row(g, row), message, column, block.lanes(v));
          sum[v] = Simd::add(sum[v], grad);
          if (g.grad_edge.data) store_columns<false>(row_of(g.grad_edge, m.edge_row(e)), column, block.lanes(v), grad);
        });
      }
      if (g.grad_target.data)
        unroll<0, vectors>([&](auto v) HFCA_INLINE {
          store_columns<false>(row_of(g.grad_target, row), block.column + v * Simd::width, block.lanes(v), sum[v]);
        });
    });
}

inline void gradient_by_source(const hfca::MessageGradient& g, int64_t begin, int64_t end) {
  const hfca::Message& m = g.message;
  const int64_t bytes = g.groups * m.features * static_cast<int64_t>(sizeof(float));
  const auto prefetch = [&](int64_t e) HFCA_INLINE {
    if (e >= m.graph.edges) return;
    const char* table = reinterpret_cast<const char*>(table_row(g, m.graph.col[e]));
    for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(table + byte);
    if (!m.target.data) return;
    const char* target = row_at<false>(m.target, m.graph.col[e], 0);
    for (int64_t byte = 0; byte < m.features * 4; byte += 64) __builtin_prefetch(target + byte);
  };
  for (int64_t row = begin; row < end; ++row)
    for_message_blocks(m.features, [&](const auto& block) HFCA_INLINE {
      constexpr int vectors = std::decay_t<decltype(block)>::count;
      Float x[vectors], sum[vectors];
      const auto column = [&](int v) { return block.column + v * Simd::width; };
      unroll<0, vectors>([&](auto v) HFCA_INLINE {
        x[v] = load_columns<false>(row_of(m.x, row), column(v), block.lanes(v));
        sum[v] = Simd::zero();
      });
      for (int64_t e = m.graph.rowptr[row]; e < m.graph.rowptr[row + 1]; ++e) {
        if (block.column == 0) prefetch(e + edges_ahead);
        const int64_t target = m.graph.col[e];
        unroll<0, vectors>([&](auto v) HFCA_INLINE {
          Float message = x[v];
          if (m.target.data) message = Simd::add(message, load_columns<false>(row_of(m.target, target), column(v), block.lanes(v)));
          if (m.relu) message = Simd::max(Simd::zero(), message);
          sum[v] = Simd::add(sum[v], message_gradient(g, table_row(g, target), message, column(v), block.lanes(v)));
        });
      }
      unroll<0, vectors>([&](auto v) HFCA_INLINE { store_columns<false>(row_of(g.grad_x, row), column(v), block.lanes(v), sum[v]); });
    });
}

constexpr hfca::MessageKernels message_kernels() { return {&message_rows, &write_messages, &gradient_by_target, &gradient_by_source}; }

}  // namespace HFCA_TIER
