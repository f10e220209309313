// int8 weights with input in twice as many bits as int8 has. A row becomes integers
//
//   integer = round(x / scale),   scale = max|x| / (2^15 - 1)
//
// which two rows of bytes take, integer + 2^15 = 256 * high + low, so that the sums are 256 * the first row's + the second row's. Without
// VNNI they stay whole, and the weights become int16 as they are read. Weights are read once: where memory is the limit, the exactness
// costs nothing.
#pragma once
#include "microkernel.h"

namespace HFCA_TIER {

struct WideWords : DotInt8::Words {
  static constexpr int radix = 256, middle = radix * radix / 2;

 protected:
  // store(w, integers of the words from w on) of row i.
  template <class T, class Store>
  static void quantize(const Gemm& g, int64_t row, const T* x, float zero, const Store& store) {
    convert(x, g.k, [&](const Range& range) HFCA_INLINE {
      const float magnitude = range.magnitude(), scale = magnitude / (middle - 1);
      const bool finite = magnitude <= largest_float;
      const float inverse = finite && scale > 1e-35f ? 1.0f / scale : 0.0f;  // smaller rows count as zero
      g.input_scale[row] = !finite ? not_a_number : inverse > 0.0f ? scale : 0.0f;
      g.input_zero[row] = zero;
      return [=](int64_t w, const Simd::Float(&values)[4]) HFCA_INLINE { store(w, values, Simd::set1(inverse)); };
    });
  }
};

#if HFCA_WITHOUT_VNNI
// Two words of two int16 for each word of the weight.
struct ShortWords : WideWords {
  static void pack(const Gemm& g, int64_t row, int rows) {
    uint32_t* out = g.words + row * g.input_words;
    each_row(g, row, rows, [&](int i, const auto* x) {
      quantize(g, row + i, x, 0.0f, [=](int64_t w, const Simd::Float(&values)[4], Simd::Float inverse) HFCA_INLINE {
        unroll<0, 4>([&](auto v) HFCA_INLINE {
          Simd::store_shorts(packed_word(out, rows, i, 2 * w + v * (Simd::width / 2)), Simd::mul(values[v], inverse));
        });
      });
    });
  }
};

struct Int8WeightGemm {
  using Words = ShortWords;
  static constexpr int tile_rows = DotInt8Widen::rows;

  // sums[rows][panel_columns] of all of k.
  template <int rows>
  static void multiply_all(const uint32_t* input, const uint32_t* weight, int64_t words, float* sums, hfca::Ahead ahead) {
    constexpr int64_t most = DotInt8Widen::features_at_once / 4;
    multiply<DotInt8Widen, rows>(input, weight, words < most ? words : most, sums, ahead);
    for (int64_t w = most; w < words; w += most) {
      alignas(64) float more[rows * hfca::panel_columns];
      ahead.weight += most * ahead.step;
      multiply<DotInt8Widen, rows>(input + 2 * w * rows, weight + w * hfca::panel_columns, words - w < most ? words - w : most, more,
                                   ahead);
      for (int j = 0; j < rows * hfca::panel_columns; j += Simd::width)
        Simd::store(sums + j, Simd::add(Simd::load(sums + j), Simd::load(more + j)));
    }
  }
#else
// A row of high and a row of low bytes.
struct PairedRows : WideWords {
  static void pack(const Gemm& g, int64_t row, int rows) {
    uint32_t* out = g.words + row * g.input_words;
    each_row(g, row, rows, [&](int i, const auto* x) {
      constexpr float zero = middle - packed_less * (radix + 1);
      quantize(g, row + i, x, zero, [=](int64_t w, const Simd::Float(&values)[4], Simd::Float inverse) HFCA_INLINE {
        Simd::Float high[4], low[4];
        unroll<0, 4>([&](auto v) HFCA_INLINE {
          const Simd::Float integer = Simd::round(Simd::fma(values[v], inverse, Simd::set1(middle)));
          // The nearest integer to a number that is never half way between two: the integral part of integer / radix.
          high[v] = Simd::round(Simd::fma(integer, Simd::set1(1.0f / radix), Simd::set1(0.5f / radix - 0.5f)));
          low[v] = Simd::fnma(high[v], Simd::set1(radix), integer);
        });
        store_packed_bytes(reinterpret_cast<uint8_t*>(packed_word(out, 2 * rows, 2 * i, w)), high);
        store_packed_bytes(reinterpret_cast<uint8_t*>(packed_word(out, 2 * rows, 2 * i + 1, w)), low);
      });
    });
  }
};

struct Int8WeightGemm {
  using Words = PairedRows;
  static constexpr int tile_rows = DotInt8::rows / 2;

  template <int rows>
  static void multiply_all(const uint32_t* input, const uint32_t* weight, int64_t words, float* to, hfca::Ahead ahead) {
    alignas(64) float sums[2 * rows * hfca::panel_columns];
    multiply<DotInt8, 2 * rows>(input, weight, words, sums, ahead);
    for (int i = 0; i < rows; ++i)
      for (int c = 0; c < hfca::panel_columns; c += Simd::width) {
        const float* high = sums + 2 * i * hfca::panel_columns + c;
        Simd::store(to + i * hfca::panel_columns + c,
                    Simd::fma(Simd::load(high), Simd::set1(Words::radix), Simd::load(high + hfca::panel_columns)));
      }
  }
#endif

  static int64_t input_words(const Gemm& g) { return 2 * padded_words(Words::count(g.k)); }
  static int64_t panel_bytes(const Gemm& g) { return Words::count(g.k) * 4 * hfca::panel_columns; }

  template <int rows>
  static void tile(const Gemm& g, int64_t row, int64_t panel, const uint32_t* weight, hfca::Ahead ahead) {
    alignas(64) float sums[rows * hfca::panel_columns];
    const int64_t column = panel * hfca::panel_columns, left = g.n - column;
    multiply_all<rows>(g.words + row * g.input_words, weight, Words::count(g.k), sums, ahead);
    finish<true>(g, sums, row, rows, column, left < hfca::panel_columns ? static_cast<int>(left) : hfca::panel_columns);
  }

  static void compute(const Gemm& g, int64_t row, int rows, int64_t panel, const void* weight, hfca::Ahead ahead, hfca::Part) {
    const auto* words = static_cast<const uint32_t*>(weight);
    switch (rows) {
#define HFCA_ROWS(R)                                                           \
  case R:                                                                      \
    if constexpr (R <= tile_rows) return tile<R>(g, row, panel, words, ahead); \
    else return;
      // clang-format off
      HFCA_ROWS(1) HFCA_ROWS(2) HFCA_ROWS(3) HFCA_ROWS(4) HFCA_ROWS(5) HFCA_ROWS(6) HFCA_ROWS(7)
      HFCA_ROWS(8) HFCA_ROWS(9) HFCA_ROWS(10) HFCA_ROWS(11) HFCA_ROWS(12)
      // clang-format on
#undef HFCA_ROWS
    }
  }

  static constexpr hfca::GemmKernels kernels() { return {tile_rows, 0, &input_words, &panel_bytes, &Words::pack, &compute}; }
};

}  // namespace HFCA_TIER
