// Causal convolutions over time, channel by channel: a tile of channels of one sequence at a time, from its first token to its last,
// so that the state is read and written by one thread.
#pragma once
#include <type_traits>

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

// A decoded token reads each state once, from memory: what comes next is asked for while what lies before it is computed.
inline void ask_for(const void* first, int64_t bytes) {
  constexpr int64_t line = 64;
  for (int64_t i = 0; i < bytes; i += line) __builtin_prefetch(static_cast<const char*>(first) + i, 1, 2);
}

inline void ask_for(const hfca::Array& x, int64_t first, int64_t count) {
  ask_for(element_of(x, first), count * static_cast<int64_t>(x.bf16 ? sizeof(uint16_t) : sizeof(float)));
}

// f(taps), a constant for the convolutions that models have: loops over it then become shuffles of vectors.
template <class F>
inline void with_taps(int64_t taps, const F& f) {
  if (taps == 4) return f(std::integral_constant<int64_t, 4>());
  if (taps == 3) return f(std::integral_constant<int64_t, 3>());
  f(taps);
}

// rows[k - first] = x[base .. base + wide, k] for the taps k from `first` on, through `dense` [tile * taps].
template <int64_t first>
inline void read_taps(const hfca::Array& x, int64_t base, int64_t wide, int64_t taps, float* __restrict dense, float* __restrict rows) {
  const void* from = element_of(x, base * taps);
  each_vector(wide * taps, [&](int64_t j, int n) { store_columns<false>(dense, j, n, load_any_columns(x.bf16, from, j, n)); });
  with_taps(taps, [=](auto count) HFCA_INLINE {
    for (int64_t j = 0; j < wide; ++j) {
      for (int64_t k = first; k < count; ++k) rows[(k - first) * hfca::conv_tile + j] = dense[j * count + k];
    }
  });
}

inline void write_taps(const hfca::Array& x, int64_t base, int64_t wide, int64_t taps, float* __restrict dense,
                       const float* __restrict rows) {
  with_taps(taps, [=](auto count) HFCA_INLINE {
    for (int64_t j = 0; j < wide; ++j) {
      for (int64_t k = 0; k < count; ++k) dense[j * count + k] = rows[k * hfca::conv_tile + j];
    }
  });
  void* to = const_cast<void*>(element_of(x, base * taps));
  each_vector(wide * taps, [&](int64_t j, int n) { store_any_columns(x.bf16, to, j, n, load_columns<false>(dense, j, n)); });
}

inline void causal_conv(const hfca::CausalConv& c, int64_t begin, int64_t end, float* buffer) {
  constexpr int64_t tile = hfca::conv_tile;
  const int64_t history = c.taps - 1;
  float *weight = buffer, *dense = weight + c.taps * tile, *rows = dense + c.taps * tile;
  for (int64_t piece = begin; piece < end; ++piece) {
    const int64_t sequence = piece / c.tiles(), channel = piece % c.tiles() * tile;
    const int64_t wide = c.channels - channel < tile ? c.channels - channel : tile;
    const int64_t base = sequence * c.channels + channel;
    ask_for(c.weight, (channel + tile) * c.taps, tile * c.taps);
    ask_for(c.state, (base + tile) * c.taps, tile * c.taps);
    read_taps<0>(c.weight, channel, wide, c.taps, dense, weight);
    read_taps<1>(c.state, base, wide, c.taps, dense, rows);
    for (int64_t first = 0, count; first < c.length; first += count) {
      count = c.length - first < hfca::recurrent_chunk ? c.length - first : hfca::recurrent_chunk;
      const int64_t row = sequence * c.length + first;
      read_inputs(c, row, count, channel, wide, rows + history * tile);
      for (int64_t t = 0; t < count; ++t) {
        float* out = c.output + (row + t) * c.channels + channel;
        const bool kept = !c.tokens || c.tokens[row + t];
        each_vector(wide, [&](int64_t j, int n) {
          Float sum = c.bias.data ? load_any_columns(c.bias.bf16, c.bias.data, channel + j, n) : Simd::zero();
          for (int64_t k = 0; k < c.taps; ++k) {
            sum = Simd::fma(load_columns<false>(weight + k * tile, j, n), load_columns<false>(rows + (t + k) * tile, j, n), sum);
          }
          store_columns<false>(out, j, n, !kept ? Simd::zero() : c.silu ? silu(sum) : sum);
        });
      }
      if (first + count == c.length) {
        write_taps(c.state, base, wide, c.taps, dense, rows + (count - 1) * tile);
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
    const Float scale = Simd::set1(g.weight.data ? 1.0f / __builtin_sqrtf(squares / static_cast<float>(g.columns) + g.eps) : 1.0f);
    const int64_t at = g.weight_per_group ? first : 0;
    each_vector(g.columns, [&](int64_t j, int n) {
      Float value = Simd::mul(load_columns<false>(x, j, n), scale);
      if (g.weight.data) value = Simd::mul(value, load_any_columns(g.weight.bf16, g.weight.data, at + j, n));
      if (!g.gate_first) value = Simd::mul(value, gated(j, n));
      store_any_columns(g.output.bf16, out, first + j, n, value);
    });
  }
}

}  // namespace HFCA_TIER
