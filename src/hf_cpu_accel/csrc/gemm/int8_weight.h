// int8 weights with input in twice as many bits as int8 has. A row becomes two rows of bytes, the high and the low halves of
//
//   integer = round(x / scale) + radix^2 / 2 = radix * high + low,   scale = max|x| / (radix^2 / 2 - 1)
//
// with radix 256 (128 without VNNI, whose input has 7 bits), and the sums are radix * the first row's + the second row's. Weights are read
// once for both: where memory is the limit, the exactness costs nothing.
#pragma once
#include "microkernel.h"

namespace HFCA_TIER {

struct WideBytes : DotInt8::Words {
  static constexpr int radix = DotInt8::steps > 128 ? 256 : 128, middle = radix * radix / 2;

  static void pack(const Gemm& g, int64_t row, int rows) {
    uint32_t* out = g.words + row * g.input_words;
    each_row(g, row, rows, [&](int i, const auto* x) {
      convert(x, g.k, [&](const Range& range) HFCA_INLINE {
        const float magnitude = range.magnitude(), scale = magnitude / (middle - 1);
        const bool finite = magnitude <= largest_float;
        const float inverse = finite && scale > 1e-35f ? 1.0f / scale : 0.0f;  // smaller rows count as zero
        g.input_scale[row + i] = !finite ? not_a_number : inverse > 0.0f ? scale : 0.0f;
        g.input_zero[row + i] = middle - packed_less * (radix + 1);
        return [=](int64_t w, const Simd::Float(&values)[4]) HFCA_INLINE {
          Simd::Float high[4], low[4];
          unroll<0, 4>([&](auto v) HFCA_INLINE {
            const Simd::Float integer = Simd::round(Simd::fma(values[v], Simd::set1(inverse), Simd::set1(middle)));
            // The nearest integer to a number that is never half way between two: the integral part of integer / radix.
            high[v] = Simd::round(Simd::fma(integer, Simd::set1(1.0f / radix), Simd::set1(0.5f / radix - 0.5f)));
            low[v] = Simd::fnma(high[v], Simd::set1(radix), integer);
          });
          store_packed_bytes(reinterpret_cast<uint8_t*>(packed_word(out, 2 * rows, 2 * i, w)), high);
          store_packed_bytes(reinterpret_cast<uint8_t*>(packed_word(out, 2 * rows, 2 * i + 1, w)), low);
        };
      });
    });
  }
};

struct Int8WeightGemm {
  static constexpr int tile_rows = DotInt8::rows / 2;

  static int64_t input_words(const Gemm& g) { return 2 * padded_words(WideBytes::count(g.k)); }
  static int64_t panel_bytes(const Gemm& g) { return WideBytes::count(g.k) * 4 * hfca::panel_columns; }

  template <int rows>
  static void tile(const Gemm& g, int64_t row, int64_t panel, const uint32_t* weight, hfca::Ahead ahead) {
    alignas(64) float sums[2 * rows * hfca::panel_columns];
    const int64_t column = panel * hfca::panel_columns, left = g.n - column;
    multiply<DotInt8, 2 * rows>(g.words + row * g.input_words, weight, WideBytes::count(g.k), sums, ahead);
    for (int i = 0; i < rows; ++i)
      for (int c = 0; c < hfca::panel_columns; c += Simd::width) {
        const float* high = sums + 2 * i * hfca::panel_columns + c;
        Simd::store(sums + i * hfca::panel_columns + c,
                    Simd::fma(Simd::load(high), Simd::set1(WideBytes::radix), Simd::load(high + hfca::panel_columns)));
      }
    finish<true>(g, sums, row, rows, column, left < hfca::panel_columns ? static_cast<int>(left) : hfca::panel_columns);
  }

  static void compute(const Gemm& g, int64_t row, int rows, int64_t panel, const void* weight, hfca::Ahead ahead, hfca::Part) {
    const auto* words = static_cast<const uint32_t*>(weight);
    switch (rows) {
#define HFCA_ROWS(R)                                                           \
  case R:                                                                      \
    if constexpr (R <= tile_rows) return tile<R>(g, row, panel, words, ahead); \
    else return;
      HFCA_ROWS(1) HFCA_ROWS(2) HFCA_ROWS(3) HFCA_ROWS(4) HFCA_ROWS(5) HFCA_ROWS(6) HFCA_ROWS(7)
#undef HFCA_ROWS
    }
  }

  static constexpr hfca::GemmKernels kernels() { return {tile_rows, 0, &input_words, &panel_bytes, &WideBytes::pack, &compute}; }
};

}  // namespace HFCA_TIER
