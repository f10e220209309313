// What follows the sums of a tile where images are bytes: those that are made, or those that are added.
#pragma once
#include "activate.h"

namespace HFCA_TIER {

// The same of bytes, which are dequantized, and what is written to them quantized.
template <bool full>
inline Simd::Float load_lanes_any(const hfca::Matrix& x, int64_t at, int n) {
  if (!x.bytes) return load_lanes<full>(x, at, n);
  const auto* bytes = static_cast<const uint8_t*>(x.data) + at;
  const Simd::Float values = full ? Simd::load_uint8(bytes) : Simd::load_uint8_n(bytes, n);
  return Simd::mul(Simd::sub(values, Simd::set1(x.bytes->zero)), Simd::set1(x.bytes->scale));
}

// x: bytes before they are rounded.
template <bool full>
inline void store_as_uint8(const hfca::Matrix& to, int64_t at, Simd::Float x, Simd::Float lowest, int n) {
  auto* bytes = static_cast<uint8_t*>(to.data) + at;
  x = Simd::max(Simd::min(Simd::set1(to.bytes->most), x), lowest);  // NaN is the lowest
  full ? Simd::store_uint8(bytes, x) : Simd::store_uint8_n(bytes, x, n);
}

// One panel of a tile, as in finish_tile.
struct PanelTile {
  int64_t row, column;
  int rows, columns;

  int lanes(int vector) const {
    const int left = columns - vector * Simd::width;
    return left > Simd::width ? Simd::width : left > 0 ? left : 0;
  }
};

constexpr int panel_vectors = hfca::panel_columns / Simd::width;

// Whether a factor and a summand for each channel, and of the residual one factor, are all there is from sums to bytes. An activation other
// than ReLU has no place in that.
template <bool quantized>
inline bool requantizes(const Gemm& g) {
  const bool plain = g.activation == hfca::Activation::none || g.activation == hfca::Activation::relu;
  return plain && g.outputs[0].bytes && (!quantized || g.input.bytes) && (!g.residual.data || g.residual.bytes);
}

HFCA_INLINE inline Simd::Float load_sums(const float* p) { return Simd::load(p); }
HFCA_INLINE inline Simd::Float load_sums(const int32_t* p) { return Simd::to_float(Simd::load_int(p)); }

// For such. All that the rows need is copied: what they store are bytes, which might be anything that a reference leads to.
template <bool quantized, bool full, class Sum>
inline void requantize_tile(const Gemm& g, const Sum* sums, const PanelTile& of) {
  const PanelTile tile = of;
  const hfca::Matrix output = g.outputs[0], residual = g.residual, bias{g.bias.data, 0, g.bias.bf16};
  const hfca::ByteSteps to = *output.bytes;
  const Simd::Float inverse = Simd::set1(to.inverse), lowest = Simd::set1(g.activation == hfca::Activation::relu ? to.zero : 0.0f);
  [[maybe_unused]] const auto least = static_cast<uint8_t>(g.activation == hfca::Activation::relu ? to.zero : 0.0f);
  const float added_scale = residual.data ? residual.bytes->scale * to.inverse : 0.0f;
  const Simd::Float added = Simd::set1(added_scale);
  const Simd::Float zero = Simd::set1(residual.data ? to.zero - residual.bytes->zero * added_scale : to.zero);
  Simd::Float factor[panel_vectors], summand[panel_vectors];
  unroll<0, panel_vectors>([&](auto v) HFCA_INLINE {
    const int64_t c = tile.column + v * Simd::width;
    const int n = tile.lanes(v);
    factor[v] = inverse;
    Simd::Float offset = bias.data ? load_any_n(bias, 0, c, n) : Simd::zero();
    if constexpr (quantized) {
      const Simd::Float scale = Simd::mul(Simd::load_n(g.weight_scale + c, n), Simd::set1(g.input.bytes->scale));
      offset = Simd::fnma(Simd::mul(Simd::load_n(g.weight_sum + c, n), Simd::set1(packed_zero(g.input.bytes->zero))), scale, offset);
      factor[v] = Simd::mul(scale, inverse);
    }
    summand[v] = Simd::fma(offset, inverse, zero);
  });
  const auto row_of = [&](const hfca::Matrix& image, int i)
                          HFCA_INLINE { return static_cast<uint8_t*>(image.data) + image.offset(tile.row + i) + tile.column; };
  const auto rows = [&](auto adds) HFCA_INLINE {
    const auto bytes_of = [&](int i, const uint8_t* other, auto v) HFCA_INLINE {
      const Simd::Float x = Simd::fma(load_sums(sums + i * hfca::panel_columns + v * Simd::width), factor[v], summand[v]);
      if constexpr (!adds) return x;
      const uint8_t* const bytes = other + v * Simd::width;
      return Simd::fma(full ? Simd::load_uint8(bytes) : Simd::load_uint8_n(bytes, tile.lanes(v)), added, x);
    };
    const auto other_of = [&](int i) HFCA_INLINE { return adds ? row_of(residual, i) : nullptr; };
    int i = 0;
#if defined(HFCA_SIMD_AVX512)  // two rows are one vector of bytes
    if constexpr (full)
      for (const Simd::Float most = Simd::set1(to.most); i + 2 <= tile.rows; i += 2) {
        const uint8_t* const others[] = {other_of(i), other_of(i + 1)};
        Simd::Float x[2 * panel_vectors];
        unroll<0, 2 * panel_vectors>([&](auto v) HFCA_INLINE {
          x[v] = Simd::min(most, bytes_of(i + v / panel_vectors, others[v / panel_vectors], Index<v % panel_vectors>{}));
        });
        Simd::store_byte_rows(row_of(output, i), row_of(output, i + 1), x, least);
      }
#endif
    for (; i < tile.rows; ++i) {
      const int64_t at = output.offset(tile.row + i) + tile.column;
      const uint8_t* const other = other_of(i);
      unroll<0, panel_vectors>(
          [&](auto v) HFCA_INLINE { store_as_uint8<full>(output, at + v * Simd::width, bytes_of(i, other, v), lowest, tile.lanes(v)); });
    }
  };
  residual.data ? rows(Index<1>{}) : rows(Index<0>{});
}

// All else, number by number.
template <hfca::Activation act, bool quantized, bool full>
inline void finish_any_tile(const Gemm& g, const float* sums, const PanelTile& tile) {
  const hfca::Matrix &output = g.outputs[0], &residual = g.residual, bias{g.bias.data, 0, g.bias.bf16};
  for (int i = 0; i < tile.rows; ++i)
    unroll<0, panel_vectors>([&](auto v) HFCA_INLINE {
      const int64_t c = tile.column + v * Simd::width, row = tile.row + i;
      const int n = tile.lanes(v);
      Simd::Float x = Simd::load(sums + i * hfca::panel_columns + v * Simd::width);
      const Simd::Float offset = bias.data ? load_any_n(bias, 0, c, n) : Simd::zero();
      if constexpr (quantized) {
        x = Simd::fnma(Simd::set1(g.input_zero[row]), Simd::load_n(g.weight_sum + c, n), x);
        x = Simd::fma(Simd::mul(x, Simd::load_n(g.weight_scale + c, n)), Simd::set1(g.input_scale[row]), offset);
      } else {
        x = Simd::add(x, offset);
      }
      if (residual.data) x = Simd::add(x, load_lanes_any<full>(residual, residual.offset(row) + c, n));
      x = activate<act, false>(x);
      const int64_t at = output.offset(row) + c;
      if (!output.bytes) return store_lanes<full>(output, at, x, n);
      const Simd::Float byte = Simd::fma(x, Simd::set1(output.bytes->inverse), Simd::set1(output.bytes->zero));
      store_as_uint8<full>(output, at, byte, Simd::zero(), n);
    });
}

// Of convolutions: one output, and what is added is added before the activation.
template <bool quantized, bool full>
inline void finish_bytes(const Gemm& g, const float* sums, const PanelTile& tile) {
  using hfca::Activation;
  if (requantizes<quantized>(g)) return requantize_tile<quantized, full>(g, sums, tile);
  switch (g.activation) {
#define HFCA_ACTIVATION(A) \
  case Activation::A: return finish_any_tile<Activation::A, quantized, full>(g, sums, tile);
    HFCA_ACTIVATION(none)
    HFCA_ACTIVATION(gelu)
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

}  // namespace HFCA_TIER
