// Input packing: rows of float32/bfloat16 to words, [k_words / 16][rows][16]. The multiplication broadcasts word by word from all rows of
// a tile: in this layout at fixed distances from each other, and yet a row is written by whole cache lines, without a transposition.
#pragma once
#include <cstring>

#include "../simd/simd.h"
#include "../simd/unroll.h"
#include "gemm.h"
#include "packed_bytes.h"
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

constexpr int64_t padded_words(int64_t words) { return (words + packed_words - 1) / packed_words * packed_words; }

// f(x) with x of the type of the input's elements.
template <class F>
inline void typed(const Gemm& g, const void* x, const F& f) {
  g.input.bf16 ? f(static_cast<const uint16_t*>(x)) : f(static_cast<const float*>(x));
}

// f(i, first element, x, n): row i of the tile has the elements x[0, n) from its first one on.
template <class F>
inline void each_run(const Gemm& g, int64_t row, int rows, const F& f) {
  const hfca::Runs& runs = g.runs;
  for (int i = 0; i < rows; ++i) {
    if (!runs.starts) {
      const int64_t at = g.input.offset(row + i) * (g.input.bf16 ? 2 : 4);
      typed(g, static_cast<const char*>(g.input.data) + at, [&](const auto* x) { f(i, int64_t{0}, x, g.k); });
      continue;
    }
    for (int64_t j = 0; j < runs.count; ++j)
      typed(g, runs.starts[i * runs.count + j], [&](const auto* x) { f(i, j * runs.length, x, runs.length); });
  }
}

// f(i, row i of the tile) where each is one run.
template <class F>
inline void each_row(const Gemm& g, int64_t row, int rows, const F& f) {
  each_run(g, row, rows, [&](int i, int64_t, const auto* x, int64_t) { f(i, x); });
}

// Where word w of row i of a packed tile lies.
inline uint32_t* packed_word(uint32_t* tile, int rows, int i, int64_t w) {
  return tile + (w / packed_words * rows + i) * packed_words + w % packed_words;
}

// Values [j, j + width) of x[0, k), zeros behind the end.
template <class T>
inline Simd::Float load_padded(const T* x, int64_t j, int64_t k) {
  const int64_t left = k - j;
  return left >= Simd::width ? load_as_float(x + j) : left > 0 ? load_as_float_n(x + j, static_cast<int>(left)) : Simd::zero();
}

// One float32 per word; padded with zeros to a multiple of `multiple` words.
template <int multiple>
struct FloatWords {
  static constexpr int64_t count(int64_t k) { return (k + multiple - 1) / multiple * multiple; }

  static constexpr int64_t run_elements = packed_words;

  // Channels [c, c + width) of row i, where those of a row are whole lines.
  static void store_channels(uint32_t* tile, int rows, int i, int64_t c, Simd::Float x) {
    Simd::store(reinterpret_cast<float*>(packed_word(tile, rows, i, c)), x);
  }

  static void pack(const Gemm& g, int64_t row, int rows) {
    uint32_t* out = g.words + row * g.input_words;
    each_run(g, row, rows, [&](int i, int64_t first, const auto* x, int64_t k) {
      const int64_t words = padded_words(count(k));
      for (int64_t w = 0; w < words; w += Simd::width)
        Simd::store(reinterpret_cast<float*>(packed_word(out, rows, i, first + w)), load_padded(x, w, k));
    });
  }
};

// Two bfloat16 per word.
struct Bf16Words {
  static constexpr int64_t count(int64_t k) { return (k + 1) / 2; }

  static constexpr int64_t run_elements = 2 * packed_words;

  // Channels [c, c + width) of row i, where those of a row are whole lines.
  static void store_channels(uint32_t* tile, int rows, int i, int64_t c, Simd::Float x) {
    Simd::store_bf16(reinterpret_cast<uint16_t*>(packed_word(tile, rows, i, c / 2)), x);
  }

  static void pack(const Gemm& g, int64_t row, int rows) {
    uint32_t* out = g.words + row * g.input_words;
    each_run(g, row, rows, [&](int i, int64_t first, const auto* x, int64_t k) {
      uint32_t* const to = packed_word(out, rows, i, first / 2);
      const int64_t words = padded_words(count(k)), whole = copied(x, k, to, rows * packed_words);
      for (int64_t w = whole; w < words; w += Simd::width / 2)
        Simd::store_bf16(reinterpret_cast<uint16_t*>(packed_word(to, rows, 0, w)), load_padded(x, 2 * w, k));
    });
  }

 private:
  // How many words of x[0, k) were there already and are copied to lines that far apart.
  static int64_t copied(const float*, int64_t, uint32_t*, int64_t) { return 0; }
  static int64_t copied(const uint16_t* x, int64_t k, uint32_t* to, int64_t apart) {
    const int64_t lines = k / run_elements;
    for (int64_t line = 0; line < lines; ++line) std::memcpy(to + line * apart, x + line * run_elements, packed_words * sizeof(uint32_t));
    return lines * packed_words;
  }
};

// The range of values and 0.
struct Range {
  Simd::Float low = Simd::zero(), high = Simd::zero();

  HFCA_INLINE void add(Simd::Float x) {
    low = Simd::lowest(low, x);
    high = Simd::highest(high, x);
  }
  // NaN if there is one in one of the two.
  float largest() const { return Simd::reduce_highest(high); }
  float least() const {
    const float x = Simd::reduce_lowest(low);
    return x > 0.0f ? 0.0f : x;
  }
  // max|x|; NaN if there is one.
  float magnitude() const {
    const float below = -least(), above = largest();
    return below <= above ? above : above <= below ? below : not_a_number;
  }
};

// What numbers in [low, high], which holds 0, are quantized with:
//   byte = round(x * inverse) + zero,   scale = (high - low) / steps,   inverse = 1 / scale,   zero = 1 + round(-low / scale)
// Rounding stays within [0, steps + 2], so that no byte needs clamping.
inline hfca::ByteSteps byte_steps(float low, float high, int count) {
  const auto steps = static_cast<float>(count);
  const float scale = high / steps - low / steps;  // the difference first might overflow
  const bool finite = scale <= largest_float;
  // Numbers too small for 1 / scale to exist count as zero: what they add is below 1e-30.
  const float inverse = finite && scale > 1e-33f ? 1.0f / scale : 0.0f;
  const float zero = 1.0f - first_of(Simd::round(Simd::set1(finite ? low * inverse : 0.0f)));
  return {!finite ? not_a_number : inverse > 0.0f ? scale : 0.0f, inverse, zero};  // NaN: all that is computed from them
}

// The same for numbers that are clamped to [low, high], which needs no room for rounding:
//   zero = round(-low / scale), byte in [0, most]
inline hfca::ByteSteps known_byte_steps(float low, float high, int count) {
  const auto most = static_cast<float>(count);
  const float scale = high / most - low / most, inverse = scale > 1e-33f ? 1.0f / scale : 0.0f;
  return {scale, inverse, first_of(Simd::round(Simd::set1(-low * inverse))), most};
}

// values[0, 4 * width) in bytes, of an image or `packed`.
template <bool packed>
HFCA_INLINE inline void store_as_bytes(uint8_t* to, const Simd::Float (&values)[4], const hfca::ByteSteps& with) {
  Simd::Float bytes[4];
  unroll<0, 4>([&](auto v) HFCA_INLINE { bytes[v] = Simd::fma(values[v], Simd::set1(with.inverse), Simd::set1(with.zero)); });
  packed ? store_packed_bytes(to, bytes) : Simd::store_bytes(to, bytes);
}

// Four uint8 per word. Rows are rotated (rotate.h) and then quantized, each over the range of its own values. `less`: see packed_less.
template <int steps, int less = packed_less>
struct ByteWords {
  static constexpr int64_t run_elements = 0;  // the rotation mixes what lies side by side in a row
  static int64_t count(int64_t k) { return (k + 3) / 4; }

  static void pack(const Gemm& g, int64_t row, int rows) {
    uint32_t* out = g.words + row * g.input_words;
    each_row(g, row, rows, [&](int i, const auto* x) {
      const hfca::ByteSteps with = pack_row(x, g.k, out, rows, i);
      g.input_scale[row + i] = with.scale;
      g.input_zero[row + i] = with.zero - static_cast<float>(less);
    });
  }

  // x[0, k) as row i of a tile.
  template <class T>
  static hfca::ByteSteps pack_row(const T* x, int64_t k, uint32_t* tile, int rows, int i) {
    hfca::ByteSteps with;
    convert(x, k, [&](const Range& range) HFCA_INLINE {
      with = byte_steps(range.least(), range.largest(), steps);
      return [=](int64_t w, const Simd::Float(&values)[4])
                 HFCA_INLINE { store_as_bytes<true>(reinterpret_cast<uint8_t*>(packed_word(tile, rows, i, w)), values, with); };
    });
    return with;
  }

 protected:
  // prepare(range of the row) gives store(w, values), which is called with the rotated values of the words from w on, and so through the
  // row x[0, k), filled up with zeros to whole cache lines of words.
  template <class T, class Prepare>
  static void convert(const T* x, int64_t k, const Prepare& prepare) {
    alignas(64) float rotated[stretch];
    Range range;
    for (int64_t j = 0; j < k; j += stretch) rotate(x + j, k - j, rotated, range);
    const auto store = prepare(range);
    for (int64_t j = 0; j < k; j += stretch) {
      if (k > stretch) rotate(x + j, k - j, rotated, range);
      const int64_t words = padded_words(count(k - j < stretch ? k - j : stretch));
      for (int64_t w = 0; w < words; w += Simd::width) {
        Simd::Float values[4];
        unroll<0, 4>([&](auto v) HFCA_INLINE { values[v] = Simd::load(rotated + 4 * w + v * Simd::width); });
        store(j / 4 + w, values);
      }
    }
  }

 private:
  // Values that are rotated at a time: a row up to this length stays in L1 between the two passes over it, a longer one (the FFN of a
  // large decoder) is rotated in both.
  static constexpr int64_t stretch = 4096;
  static_assert(stretch % rotated_features == 0, "the rotation's blocks must not be cut");

  // The rotated values of x[0, k), up to a whole stretch of them, filled up with zeros to whole cache lines of bytes.
  template <class T>
  static void rotate(const T* x, int64_t k, float* rotated, Range& range) {
    const int64_t n = k < stretch ? k : stretch;
    Range seen = range;  // in registers
    int64_t j = 0;
    for (; j + rotated_features <= n; j += rotated_features) {
      Simd::Float block[rotated_vectors];
      unroll<0, rotated_vectors>([&](auto i) HFCA_INLINE { block[i] = load_as_float(x + j + i * Simd::width); });
      rotate_block(block);
      unroll<0, rotated_vectors>([&](auto i) HFCA_INLINE {
        Simd::store(rotated + j + i * Simd::width, block[i]);
        seen.add(block[i]);
      });
    }
    for (; j < 4 * padded_words(count(n)); j += Simd::width) {
      const Simd::Float value = Simd::mul(load_padded(x, j, n), Simd::set1(rotation_scale));
      Simd::store(rotated + j, value);
      seen.add(value);
    }
    range = seen;
  }
};

// Rows of bytes, which lie in runs of whole lines.
inline void pack_lines(const Gemm& g, int64_t row, int rows) {
  uint32_t* to = g.words + row * g.input_words;
  constexpr int64_t line = packed_words * sizeof(uint32_t);
  if (!g.runs.starts) {
    for (int64_t at = 0; at < g.k; at += line)
      for (int i = 0; i < rows; ++i, to += packed_words)
        pack_line(to, static_cast<const char*>(g.input.data) + g.input.offset(row + i) + at);
    return;
  }
  for (int64_t j = 0; j < g.runs.count; ++j)
    for (int64_t at = 0; at < g.runs.length; at += line)
      for (int i = 0; i < rows; ++i, to += packed_words) pack_line(to, static_cast<const char*>(g.runs.starts[i * g.runs.count + j]) + at);
}

// Rows of images in whole lines of bytes, or, with steps, of numbers that become these.
inline void pack_image_rows(const Gemm& g, int64_t row, int rows) {
  if (g.input.bytes)
    for (int i = 0; i < rows; ++i) g.input_scale[row + i] = g.input.bytes->scale, g.input_zero[row + i] = packed_zero(g.input.bytes->zero);
  if (!g.image_steps) {
    if constexpr (packed_less != 0)  // the caller has just written those of images with a zero point each
      for (int i = 0; i < rows && !g.input.bytes; ++i) g.input_zero[row + i] = packed_zero(g.input_zero[row + i]);
    return pack_lines(g, row, rows);
  }
  uint32_t* const out = g.words + row * g.input_words;
  each_row(g, row, rows, [&](int i, const auto* x) {
    const hfca::ByteSteps with = g.image_steps[(g.first_row + row + i) / g.image_rows];
    g.input_scale[row + i] = with.scale, g.input_zero[row + i] = packed_zero(with.zero);
    for (int64_t c = 0; c < g.k; c += 4 * Simd::width) {
      Simd::Float values[4];
      unroll<0, 4>([&](auto v) HFCA_INLINE { values[v] = load_as_float(x + c + v * Simd::width); });
      store_as_bytes<true>(reinterpret_cast<uint8_t*>(packed_word(out, rows, i, c / 4)), values, with);
    }
  });
}

}  // namespace HFCA_TIER
