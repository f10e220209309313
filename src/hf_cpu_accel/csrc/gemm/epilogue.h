// What happens to a tile of sums on its way out: dequantisation, bias, activation, residual, rounding to the output type.
#pragma once
#include "../simd/math.h"
#include "pack.h"

namespace HFCA_TIER {

template <hfca::Activation act>
inline Simd::Float activate(Simd::Float x) {
  using hfca::Activation;
  if constexpr (act == Activation::gelu) {  // x/2 (1 + erf(x / sqrt 2))
    const Simd::Float half = Simd::mul(x, Simd::set1(0.5f));
    return Simd::fma(half, erf(Simd::mul(x, Simd::set1(0.70710678118654752f))), half);
  } else if constexpr (act == Activation::gelu_tanh) {  // x sigmoid(2 u), u = sqrt(2/pi) (x + 0.044715 x^3)
    const Simd::Float u = Simd::mul(x, Simd::fma(Simd::mul(x, x), Simd::set1(0.0713548162726f), Simd::set1(1.5957691216057f)));
    return Simd::mul(x, sigmoid(u));
  } else if constexpr (act == Activation::relu) {
    return Simd::max(Simd::zero(), x);
  } else if constexpr (act == Activation::silu) {
    return Simd::mul(x, sigmoid(x));
  } else if constexpr (act == Activation::quick_gelu) {
    return Simd::mul(x, sigmoid(Simd::mul(x, Simd::set1(1.702f))));
  } else if constexpr (act == Activation::tanh) {
    return tanh(x);
  } else {
    return x;
  }
}

// sums: [rows][panel_columns] float32 of one panel, `columns` of them valid. quantised: int8 weights and input.
template <hfca::Activation act, bool quantised>
inline void finish_tile(const Gemm& g, const float* sums, int64_t row, int rows, int64_t column, int columns) {
  const hfca::Matrix bias{g.bias.data, 0, g.bias.bf16};
  int part = 0;
  while (column >= g.output_begin[part + 1]) ++part;
  const hfca::Matrix output = g.outputs[part];
  for (int j = 0; j < columns; j += Simd::width) {
    const int n = columns - j < Simd::width ? columns - j : Simd::width;
    const int64_t c = column + j;
    const Simd::Float offset = bias.data ? load_any_n(bias, 0, c, n) : Simd::zero();
    Simd::Float scale = Simd::zero(), sum = Simd::zero();
    if constexpr (quantised) {
      scale = Simd::load_n(g.weight_scale + c, n);
      sum = Simd::load_n(g.weight_sum + c, n);
    }
    for (int i = 0; i < rows; ++i) {
      Simd::Float x = Simd::load(sums + i * hfca::panel_columns + j);
      if constexpr (quantised)
        // The weight's scale first: the sum times the input's scale may leave float32 where the product of all does not.
        x = Simd::fma(Simd::mul(Simd::fnma(Simd::set1(g.input_zero[row + i]), sum, x), scale), Simd::set1(g.input_scale[row + i]), offset);
      else
        x = Simd::add(x, offset);
      x = activate<act>(x);
      if (g.residual.data) x = Simd::add(x, load_any_n(g.residual, row + i, c, n));
      const int64_t at = output.offset(row + i) + c - g.output_begin[part];
      if (output.bf16)
        Simd::store_bf16_n(static_cast<uint16_t*>(output.data) + at, x, n);
      else
        Simd::store_n(static_cast<float*>(output.data) + at, x, n);
    }
  }
}

template <bool quantised>
inline void finish(const Gemm& g, const float* sums, int64_t row, int rows, int64_t column, int columns) {
  using hfca::Activation;
  switch (g.activation) {
    case Activation::none: return finish_tile<Activation::none, quantised>(g, sums, row, rows, column, columns);
    case Activation::gelu: return finish_tile<Activation::gelu, quantised>(g, sums, row, rows, column, columns);
    case Activation::gelu_tanh: return finish_tile<Activation::gelu_tanh, quantised>(g, sums, row, rows, column, columns);
    case Activation::relu: return finish_tile<Activation::relu, quantised>(g, sums, row, rows, column, columns);
    case Activation::silu: return finish_tile<Activation::silu, quantised>(g, sums, row, rows, column, columns);
    case Activation::quick_gelu: return finish_tile<Activation::quick_gelu, quantised>(g, sums, row, rows, column, columns);
    case Activation::tanh: return finish_tile<Activation::tanh, quantised>(g, sums, row, rows, column, columns);
  }
}

}  // namespace HFCA_TIER
