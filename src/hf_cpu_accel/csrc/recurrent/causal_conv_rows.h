// Causal convolutions over time, channel by channel: a tile of channels of one sequence at a time, from its first token to its last,
// so that the state is read and written by one thread.
#pragma once
#include "../encoder/token_row_steps.h"
#include "recurrent.h"

namespace HFCA_TIER {

inline Float silu(Float x) { return Simd::mul(x, sigmoid(x)); }

// The inputs of `count` tokens from row `first` on, as float32.
inline void read_inputs(const hfca::CausalConv& c, int64_t first, int64_t count, int64_t channel, int64_t wide, float* to) {
  for (int64_t t = 0; t < count; ++t, to += hfca::conv_tile) {
    const void* x = row_of(c.input, first + t);
    const void* gate = c.gate.data ? row_of(c.gate, first + t) : nullptr;
    each_vector(wide, [&](int64_t j, int n) {
      Float value = load_any_columns(c.input.bf16, x, channel + j, n);
      if (gate) value = Simd::mul(value, load_any_columns(c.gate.bf16, gate, channel + j, n));
      store_columns<false>(to, j, n, value);
    });
  }
}

template <bool bf16>
inline float state_at(const void* state, int64_t at) {
  if constexpr (bf16) return Simd::reduce_add(Simd::load_bf16_n(static_cast<const uint16_t*>(state) + at, 1));
  else return static_cast<const float*>(state)[at];
}

// The last inputs but one, of which the state has one more: rows[k] = state[:, k + 1].
template <bool bf16>
inline void read_state(const hfca::CausalConv& c, int64_t base, int64_t wide, float* rows) {
  for (int64_t j = 0; j < wide; ++j) {
    for (int64_t k = 1; k < c.taps; ++k) rows[(k - 1) * hfca::conv_tile + j] = state_at<bf16>(c.state.data, base + j * c.taps + k);
  }
}

template <bool bf16>
inline void write_state(const hfca::CausalConv& c, int64_t base, int64_t wide, const float* rows) {
  float values[Simd::width];
  for (int64_t j = 0; j < wide; ++j) {
    for (int64_t k = 0; k < c.taps; ++k) {
      const float x = rows[k * hfca::conv_tile + j];
      if constexpr (bf16) {
        values[0] = x;
        Simd::store_bf16_n(static_cast<uint16_t*>(c.state.data) + base + j * c.taps + k, Simd::load_n(values, 1), 1);
      } else {
        static_cast<float*>(c.state.data)[base + j * c.taps + k] = x;
      }
    }
  }
}

inline void causal_conv(const hfca::CausalConv& c, int64_t begin, int64_t end, float* rows) {
  constexpr int64_t tile = hfca::conv_tile;
  const int64_t history = c.taps - 1;
  for (int64_t piece = begin; piece < end; ++piece) {
    const int64_t sequence = piece / c.tiles(), channel = piece % c.tiles() * tile;
    const int64_t wide = c.channels - channel < tile ? c.channels - channel : tile;
    const int64_t base = (sequence * c.channels + channel) * c.taps;
    c.state.bf16 ? read_state<true>(c, base, wide, rows) : read_state<false>(c, base, wide, rows);
    for (int64_t first = 0, count; first < c.length; first += count) {
      count = c.length - first < hfca::recurrent_chunk ? c.length - first : hfca::recurrent_chunk;
      const int64_t row = sequence * c.length + first;
      read_inputs(c, row, count, channel, wide, rows + history * tile);
      for (int64_t t = 0; t < count; ++t) {
        float* out = c.output + (row + t) * c.channels + channel;
        const bool kept = !c.tokens || c.tokens[row + t];
        each_vector(wide, [&](int64_t j, int n) {
          Float sum = c.bias ? load_columns<false>(c.bias, channel + j, n) : Simd::zero();
          for (int64_t k = 0; k < c.taps; ++k) {
            sum = Simd::fma(load_columns<false>(c.weight, k * c.channels + channel + j, n), load_columns<false>(rows + (t + k) * tile, j, n), sum);
          }
          store_columns<false>(out, j, n, !kept ? Simd::zero() : c.silu ? silu(sum) : sum);
        });
      }
      if (first + count == c.length) {
        const float* last = rows + (count - 1) * tile;
        c.state.bf16 ? write_state<true>(c, base, wide, last) : write_state<false>(c, base, wide, last);
      } else {
        for (int64_t k = 0; k < history * tile; ++k) rows[k] = rows[count * tile + k];
      }
    }
  }
}

inline void gated_rows(const hfca::GatedRows& g, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const void* gate = row_of(g.gate, row);
    void* out = row_of(g.output, row);
    each_vector(g.columns, [&](int64_t j, int n) {
      const Float x = load_columns<false>(g.input, row * g.columns + j, n);
      store_any_columns(g.output.bf16, out, j, n, Simd::mul(x, load_any_columns(g.gate.bf16, gate, j, n)));
    });
  }
}

// Pairs of row and group.
inline void gated_norm(const hfca::GatedNorm& g, int64_t begin, int64_t end, float* x) {
  for (int64_t piece = begin; piece < end; ++piece) {
    const int64_t row = piece / g.groups, group = piece % g.groups, first = group * g.columns;
    const float* input = g.input + row * g.stride + first;
    const void* gate = row_of(g.gate, row);
    void* out = row_of(g.output, row);
    const auto gated = [&](int64_t j, int n) HFCA_INLINE { return silu(load_any_columns(g.gate.bf16, gate, first + j, n)); };
    const float squares = sum_columns(g.columns, [&](int64_t j, int n) HFCA_INLINE {
      Float value = load_columns<false>(input, j, n);
      if (g.gate_first) value = Simd::mul(value, gated(j, n));
      store_columns<false>(x, j, n, value);
      return Simd::mul(value, value);
    });
    const Float scale = Simd::set1(g.weight ? 1.0f / __builtin_sqrtf(squares / static_cast<float>(g.columns) + g.eps) : 1.0f);
    const float* weight = g.weight ? g.weight + (g.weight_per_group ? first : 0) : nullptr;
    each_vector(g.columns, [&](int64_t j, int n) {
      Float value = Simd::mul(load_columns<false>(x, j, n), scale);
      if (weight) value = Simd::mul(value, load_columns<false>(weight, j, n));
      if (!g.gate_first) value = Simd::mul(value, gated(j, n));
      store_any_columns(g.output.bf16, out, first + j, n, value);
    });
  }
}

}  // namespace HFCA_TIER
