// What happens to a tile of sums on its way out: dequantization, bias, activation, residual, rounding to the output type.
#pragma once
#include "requantize.h"

namespace HFCA_TIER {

// What joins a tile besides bias and activation. Integer sums, which take longest to finish and shortest to multiply, have loops of their
// own for the usual cases.
enum Around { nothing, residual, any };  // residual: before the activation

// sums: [rows][panel_columns] float32 of one panel, `columns` of them valid; overwritten where the results go to a TileStore. quantized: int8 weights and input. full: all columns are.
template <hfca::Activation act, bool quantized, bool full, bool coarse>
inline void finish_tile(const Gemm& g, float* sums, int64_t row, int rows, int64_t column, int columns) {
  constexpr int vectors = hfca::panel_columns / Simd::width;
  const hfca::Matrix bias{g.bias.data, 0, g.bias.bf16};
  int part = 0;
  while (column >= g.output_begin[part + 1]) ++part;
  const hfca::Matrix output = g.store.call ? hfca::Matrix{sums, hfca::panel_columns} : g.outputs[part], residual = g.residual;
  const bool multiplied = g.gated && part == 1;
  const auto lanes = [&](int v) HFCA_INLINE {
    const int left = columns - v * Simd::width;
    return full || left > Simd::width ? Simd::width : left > 0 ? left : 0;
  };
  Simd::Float offset[vectors], scale[vectors], sum[vectors];
  unroll<0, vectors>([&](auto v) HFCA_INLINE {
    const int64_t c = column + v * Simd::width;
    offset[v] = bias.data ? load_any_n(bias, 0, c, lanes(v)) : Simd::zero();
    if constexpr (quantized) {
      scale[v] = Simd::load_n(g.weight_scale + c, lanes(v));
      sum[v] = Simd::load_n(g.weight_sum + c, lanes(v));
    }
  });
  const int64_t first = g.store.call ? -row * output.stride : column - g.output_begin[part];  // the tile begins at this row
  const float *const zeros = g.input_zero + row, *const steps = g.input_scale + row;
  const auto finish_rows = [&](auto around) HFCA_INLINE {
    constexpr bool adds = around == Around::residual, any = around == Around::any;
    const Simd::Float highest = Simd::set1(g.limit), lowest = Simd::set1(-g.limit), added = Simd::set1(g.limit > 0.0f ? 1.0f : 0.0f);
    const auto limited = [&](Simd::Float x) HFCA_INLINE {
      if (any && g.limit > 0.0f) x = multiplied ? Simd::max(lowest, Simd::min(highest, x)) : Simd::min(highest, x);
      return x;
    };
    Range range;
    if (g.range) range = {Simd::load(g.range), Simd::load(g.range + hfca::range_numbers / 2)};
    for (int i = 0; i < rows; ++i) {
      Simd::Float x[vectors];
      if constexpr (quantized) {
        const Simd::Float zero = Simd::set1(zeros[i]), step = Simd::set1(steps[i]);
        // The weight's scale first: the sum times the input's scale may leave float32 where the product of all does not.
        unroll<0, vectors>([&](auto v) HFCA_INLINE {
          const Simd::Float above = Simd::fnma(zero, sum[v], Simd::load(sums + i * hfca::panel_columns + v * Simd::width));
          x[v] = limited(Simd::fma(Simd::mul(above, scale[v]), step, offset[v]));
        });
      } else {
        unroll<0, vectors>([&](auto v) HFCA_INLINE {
          x[v] = limited(Simd::add(Simd::load(sums + i * hfca::panel_columns + v * Simd::width), offset[v]));
        });
      }
      const auto add_residual = [&]() HFCA_INLINE {
        const int64_t at = residual.offset(row + i) + column;
        unroll<0, vectors>([&](auto v) HFCA_INLINE { x[v] = Simd::add(x[v], load_lanes<full>(residual, at + v * Simd::width, lanes(v))); });
      };
      if (adds || (any && residual.data && g.activates_sum)) add_residual();
      unroll<0, vectors>([&](auto v) HFCA_INLINE { x[v] = activate<act, coarse>(x[v]); });
      if (any && residual.data && !g.activates_sum) add_residual();
      const int64_t at = output.offset(row + i) + first;
      if (any && multiplied)
        unroll<0, vectors>([&](auto v) HFCA_INLINE {
          x[v] = Simd::mul(Simd::add(x[v], added), load_lanes<full>(output, at + v * Simd::width, lanes(v)));
        });
      unroll<0, vectors>([&](auto v) HFCA_INLINE { store_lanes<full>(output, at + v * Simd::width, x[v], lanes(v)); });
      if (g.range) unroll<0, vectors>([&](auto v) HFCA_INLINE { range.add(full ? x[v] : Simd::select_n(x[v], lanes(v), Simd::zero())); });
    }
    if (g.range) Simd::store(g.range, range.low), Simd::store(g.range + hfca::range_numbers / 2, range.high);
  };
  const bool usual = quantized && full && g.limit == 0.0f && !multiplied;
  if (usual && !residual.data) finish_rows(Index<Around::nothing>{});
  else if (usual && g.activates_sum) finish_rows(Index<Around::residual>{});
  else finish_rows(Index<Around::any>{});
  if (g.store.call) g.store.call(g.store.context, sums, g.first_row + row, rows, column, columns);
}

template <bool quantized, bool full>
inline void finish_panel(const Gemm& g, float* sums, int64_t row, int rows, int64_t column, int columns) {
  using hfca::Activation;
  if (g.outputs[0].bytes || g.residual.bytes) return finish_bytes<quantized, full>(g, sums, {row, column, rows, columns});
  switch (g.gated && (column >= g.output_begin[1]) != g.gate_last ? Activation::none : g.activation) {
#define HFCA_ACTIVATION(A) \
  case Activation::A: return finish_tile<Activation::A, quantized, full, false>(g, sums, row, rows, column, columns);
    case Activation::gelu:
      return g.outputs[0].bf16 ? finish_tile<Activation::gelu, quantized, full, true>(g, sums, row, rows, column, columns)
                               : finish_tile<Activation::gelu, quantized, full, false>(g, sums, row, rows, column, columns);
      HFCA_ACTIVATION(none)
      HFCA_ACTIVATION(gelu_tanh)
      HFCA_ACTIVATION(relu)
      HFCA_ACTIVATION(silu)
      // clang-format off
      HFCA_ACTIVATION(quick_gelu) HFCA_ACTIVATION(tanh) HFCA_ACTIVATION(relu2) HFCA_ACTIVATION(relu6) HFCA_ACTIVATION(hardswish)
      HFCA_ACTIVATION(leaky_relu) HFCA_ACTIVATION(leaky_relu_tenth)
    default: break;  // no op asks for others
#undef HFCA_ACTIVATION
      // clang-format on
  }
}

template <bool quantized>
inline void finish(const Gemm& g, float* sums, int64_t row, int rows, int64_t column, int columns) {
  return columns == hfca::panel_columns ? finish_panel<quantized, true>(g, sums, row, rows, column, columns)
                                        : finish_panel<quantized, false>(g, sums, row, rows, column, columns);
}

}  // namespace HFCA_TIER
