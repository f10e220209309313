// Input packing: rows of float32/bfloat16 to words, transposed to [k_words][rows].
#pragma once
#include "../simd/simd.h"
#include "../simd/unroll.h"
#include "gemm.h"
#include "rotate.h"

namespace HFCA_TIER {

using hfca::Gemm;

inline Simd::Float load_as_float(const float* p) { return Simd::load(p); }
inline Simd::Float load_as_float(const uint16_t* p) { return Simd::load_bf16(p); }
inline Simd::Float load_as_float_n(const float* p, int n) { return Simd::load_n(p, n); }
inline Simd::Float load_as_float_n(const uint16_t* p, int n) { return Simd::load_bf16_n(p, n); }

inline Simd::Float load_any_n(const hfca::Matrix& x, int64_t row, int64_t column, int n) {
  const int64_t at = x.offset(row) + column;
  return x.bf16 ? Simd::load_bf16_n(static_cast<const uint16_t*>(x.data) + at, n) : Simd::load_n(static_cast<const float*>(x.data) + at, n);
}

inline float first_of(Simd::Float x) {
  float value;
  Simd::store_n(&value, x, 1);
  return value;
}

constexpr float largest_float = 3.402823466e38f, not_a_number = __builtin_nanf("");
constexpr int max_tile_rows = 16;
constexpr int pack_words = 128;  // words of one row that are converted at a time: 16 rows of it stay in L1

// out[w * rows + i] = row(i)[w], in squares of registers. Words pass through float registers as plain bits.
template <class Row>
inline void transpose_words(Row row, int rows, int64_t words, uint32_t* out) {
  int64_t w = 0;
#if !defined(HFCA_SIMD_GENERIC)
  for (; w + Simd::width <= words; w += Simd::width) {
    Simd::Float r[Simd::width];
    unroll<0, Simd::width>([&](auto i) HFCA_INLINE {
      r[i] = i < rows ? Simd::load(reinterpret_cast<const float*>(row(i) + w)) : Simd::zero();
    });
    Simd::transpose(r);
    unroll<0, Simd::width>([&](auto i) HFCA_INLINE { Simd::store_n(reinterpret_cast<float*>(out + (w + i) * rows), r[i], rows); });
  }
#endif
  for (; w < words; ++w)
    for (int i = 0; i < rows; ++i) out[w * rows + i] = row(i)[w];
}

// One float32 per word; padded with zeros to a multiple of `multiple` words.
template <int multiple>
struct FloatWords {
  static int64_t count(int64_t k) { return (k + multiple - 1) / multiple * multiple; }

  static void pack(const Gemm& g, int64_t row, int rows) {
    uint32_t* out = g.words + row * g.input_words;
    const int64_t dense = g.input.bf16 ? 0 : g.k;  // float32 rows are words already
    const uint32_t* source[max_tile_rows];
    for (int i = 0; i < rows; ++i) source[i] = static_cast<const uint32_t*>(g.input.data) + g.input.offset(row + i);
    transpose_words([&](int i) { return source[i]; }, rows, dense, out);
    alignas(64) float block[max_tile_rows * pack_words];
    for (int64_t w = dense; w < g.input_words; w += pack_words) {
      const int64_t words = g.input_words - w < pack_words ? g.input_words - w : pack_words;
      for (int i = 0; i < rows; ++i)
        for (int64_t j = 0; j < words; j += Simd::width) {
          const int64_t left = g.k - w - j;
          const int n = left >= Simd::width ? Simd::width : left > 0 ? static_cast<int>(left) : 0;
          Simd::store(block + i * pack_words + j, load_any_n(g.input, row + i, w + j, n));
        }
      transpose_words([&](int i) { return reinterpret_cast<const uint32_t*>(block) + i * pack_words; }, rows, words, out + w * rows);
    }
  }
};

// Two bfloat16 per word.
struct Bf16Words {
  static int64_t count(int64_t k) { return (k + 1) / 2; }

  static void pack(const Gemm& g, int64_t row, int rows) {
    uint32_t* out = g.words + row * g.input_words;
    alignas(64) uint16_t block[max_tile_rows * pack_words * 2];
    for (int64_t w = 0; w < g.input_words; w += pack_words) {
      const int64_t words = g.input_words - w < pack_words ? g.input_words - w : pack_words;
      for (int i = 0; i < rows; ++i)
        for (int64_t j = 0; j < 2 * words; j += Simd::width) {
          const int64_t left = g.k - 2 * w - j;
          const int n = left >= Simd::width ? Simd::width : left > 0 ? static_cast<int>(left) : 0;
          Simd::store_bf16(block + i * pack_words * 2 + j, load_any_n(g.input, row + i, 2 * w + j, n));
        }
      transpose_words([&](int i) { return reinterpret_cast<const uint32_t*>(block) + i * pack_words; }, rows, words, out + w * rows);
    }
  }
};

// Four uint8 per word. Rows are rotated (rotate.h) and then quantised, each over the range from its least to its largest value,
// which always holds 0:
//   byte = round(x / scale) + zero,   scale = (max - min) / steps,   zero = 1 + round(-min / scale)
// Rounding stays within [0, steps + 2], so that no byte needs clamping.
template <int steps>
struct ByteWords {
  static int64_t count(int64_t k) { return (k + 3) / 4; }

  static void pack(const Gemm& g, int64_t row, int rows) {
    if (g.input.bf16) pack_rows(g, static_cast<const uint16_t*>(g.input.data), row, rows);
    else pack_rows(g, static_cast<const float*>(g.input.data), row, rows);
  }

 private:
  struct Range {
    float low, high, magnitude;  // magnitude: NaN or infinity if there is one
  };

  // take(j, n, values) for n <= Simd::width values from j on, and so through the rotated row x[0, k). Computed in both passes over a
  // row: a rotated copy of the rows of a tile would not stay in L1.
  template <class T, class Take>
  static void rotated(const T* x, int64_t k, const Take& take) {
    int64_t j = 0;
    for (; j + rotated_features <= k; j += rotated_features) {
      Simd::Float block[rotated_vectors];
      unroll<0, rotated_vectors>([&](auto i) HFCA_INLINE { block[i] = load_as_float(x + j + i * Simd::width); });
      rotate_block(block);
      unroll<0, rotated_vectors>([&](auto i) HFCA_INLINE { take(j + i * Simd::width, Simd::width, block[i]); });
    }
    for (; j < k; j += Simd::width) {
      const int n = k - j < Simd::width ? static_cast<int>(k - j) : Simd::width;
      take(j, n, Simd::mul(load_as_float_n(x + j, n), Simd::set1(rotation_scale)));
    }
  }

  template <class T>
  static Range range_of(const T* x, int64_t k) {
    Simd::Float low = Simd::zero(), high = Simd::zero(), magnitude = Simd::zero();
    rotated(x, k, [&](int64_t, int, Simd::Float value) HFCA_INLINE {
      low = Simd::min(value, low);
      high = Simd::max(value, high);
      magnitude = Simd::max_magnitude(magnitude, value);
    });
    return {-Simd::reduce_max(Simd::sub(Simd::zero(), low)), Simd::reduce_max(high), Simd::reduce_max_magnitude(magnitude)};
  }

  // The bytes of `values` values, up to a whole word; those behind the last value meet zero weights.
  template <class T>
  static void quantise(const T* x, int64_t values, float inverse, float zero_point, uint8_t* out) {
    const Simd::Float scale = Simd::set1(inverse), zero = Simd::set1(zero_point);
    rotated(x, values, [&](int64_t j, int n, Simd::Float value) HFCA_INLINE {
      const Simd::Float byte = Simd::fma(value, scale, zero);
      n == Simd::width ? Simd::store_bytes(out + j, byte) : Simd::store_bytes_n(out + j, byte, (n + 3) / 4 * 4);
    });
  }

  template <class T>
  static void pack_rows(const Gemm& g, const T* input, int64_t row, int rows) {
    uint32_t* out = g.words + row * g.input_words;
    const T* source[max_tile_rows];
    float inverse[max_tile_rows];
    for (int i = 0; i < rows; ++i) {
      source[i] = input + g.input.offset(row + i);
      const Range r = range_of(source[i], g.k);
      const float scale = r.high / steps - r.low / steps;  // the difference first might overflow
      const bool finite = r.magnitude <= largest_float;
      // Rows too small for 1 / scale to exist count as zero: what they add is below 1e-30.
      inverse[i] = finite && scale > 1e-33f ? 1.0f / scale : 0.0f;
      g.input_scale[row + i] = !finite ? not_a_number : inverse[i] > 0.0f ? scale : 0.0f;  // NaN: the whole output row
      g.input_zero[row + i] = 1.0f - first_of(Simd::round(Simd::set1(r.low * inverse[i])));
    }
    static_assert(4 * pack_words % rotated_features == 0, "what is converted at a time must be whole blocks of the rotation");
    alignas(64) uint8_t block[max_tile_rows * pack_words * 4];
    for (int64_t w = 0; w < g.input_words; w += pack_words) {
      const int64_t words = g.input_words - w < pack_words ? g.input_words - w : pack_words;
      const int64_t values = g.k - 4 * w < 4 * words ? g.k - 4 * w : 4 * words;
      for (int i = 0; i < rows; ++i)
        quantise(source[i] + 4 * w, values, inverse[i], g.input_zero[row + i], block + i * pack_words * 4);
      transpose_words([&](int i) { return reinterpret_cast<const uint32_t*>(block) + i * pack_words; }, rows, words, out + w * rows);
    }
  }
};

}  // namespace HFCA_TIER
