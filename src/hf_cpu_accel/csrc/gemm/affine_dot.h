// How bytes without a sign, the weights of affine groups, are multiplied by integers of 16 bits: affine.h.
#pragma once
#include "microkernel.h"

namespace HFCA_TIER {

// Two words of weights for Simd::width output features, one byte each, without a sign.
struct WordPair {
  Simd::Int first, second;
};

template <int bits>
struct AffineBytes;

template <>
struct AffineBytes<4> {
  static constexpr int pair_bytes = 4 * hfca::panel_columns, less_by = 0;
  static WordPair load(const uint8_t* p) {
    const Simd::Int packed = DotInt8::load(reinterpret_cast<const uint32_t*>(p));
#if defined(HFCA_SIMD_AVX512)
    const Simd::Int half = _mm512_set1_epi8(15);
    return {_mm512_and_si512(packed, half), _mm512_and_si512(_mm512_srli_epi16(packed, 4), half)};
#elif defined(HFCA_SIMD_AVX2)
    const Simd::Int half = _mm256_set1_epi8(15);
    return {_mm256_and_si256(packed, half), _mm256_and_si256(_mm256_srli_epi16(packed, 4), half)};
#elif defined(HFCA_SIMD_NEON)
    const auto low = [](int32x4_t x) { return vandq_s32(x, vdupq_n_s32(0x0F0F0F0F)); };
    const auto high = [](int32x4_t x) { return vreinterpretq_s32_u8(vshrq_n_u8(vreinterpretq_u8_s32(x), 4)); };
    return {{low(packed.low), low(packed.high)}, { high(packed.low), high(packed.high) }};
#else
    return {packed & 0x0F0F0F0F, packed >> 4 & 0x0F0F0F0F};
#endif
  }
};

template <>
struct AffineBytes<8> {
  static constexpr int pair_bytes = 8 * hfca::panel_columns,
                       less_by = packs_signed ? packed_less : 0;  // bytes are multiplied as so much less than they are
  static WordPair load(const uint8_t* p) {
    const auto* words = reinterpret_cast<const uint32_t*>(p);
    return {less(DotInt8::load(words)), less(DotInt8::load(words + hfca::panel_columns))};
  }

 private:
#if defined(HFCA_SIMD_NEON)
  static Simd::Int less(Simd::Int x) {
    const int32x4_t signs = vdupq_n_s32(static_cast<int32_t>(0x80808080u));
    return {veorq_s32(x.low, signs), veorq_s32(x.high, signs)};
  }
#else
  static Simd::Int less(Simd::Int x) { return x; }
#endif
};

constexpr int line_features = 4 * packed_words;

#if HFCA_WITHOUT_VNNI
struct AffineDot {
  static constexpr int sums = 1, most = 32767;  // of a row; largest integer
  static constexpr int input_words = 2;  // of a row that meet one word of weights

  // A line of integers.
  static void store(const float* values, uint32_t* to) {
    for (int j = 0; j < line_features; j += Simd::width) Simd::store_shorts(to + j / 2, Simd::load(values + j));
  }
  // to[vector][row] += vectors of weight words times x, the input words of the first row.
  template <int rows, int vectors>
  HFCA_INLINE static void add(Simd::Int* to, const Simd::Int (&words)[vectors], const uint32_t* x) {
    unroll<0, DotInt8Widen::substeps>([&](auto odd) HFCA_INLINE {
      Simd::Int wide[vectors];
      unroll<0, vectors>([&](auto v) HFCA_INLINE { wide[v] = DotInt8Widen::widen_unsigned(words[v], odd); });
      unroll<0, rows>([&](auto i) HFCA_INLINE {
        const auto value = DotInt8::broadcast(x + i * 2 * packed_words + odd);
        unroll<0, vectors>([&](auto v) HFCA_INLINE { to[v * rows + i] = DotInt8Widen::step(to[v * rows + i], value, wide[v]); });
      });
    });
  }
  static Simd::Float total(const Simd::Int (&sum)[sums]) { return Simd::to_float(sum[0]); }
};
#else
// Bytes without a sign in the lanes, times the four bytes with a sign of one word of the input. (DotInt8 has it the other way around.)
struct AffineDot {
  static constexpr int radix = 256;
  static constexpr int sums = 2, most = (radix / 2 - 1) * (radix + 1);  // of a row, of high and of low bytes; largest integer
  static constexpr int input_words = 1;                                 // of each half of a row that meet one word of weights

  // A line of integers: its high bytes, then its low ones, from -radix / 2 to radix / 2 - 1.
  static void store(const float* values, uint32_t* to) {
    const Simd::Float middle = Simd::set1(0.5f * static_cast<float>(radix));
    for (int j = 0; j < line_features; j += 4 * Simd::width) {
      Simd::Float high[4], low[4];
      unroll<0, 4>([&](auto v) HFCA_INLINE {
        const Simd::Float integer = Simd::load(values + j + v * Simd::width);
        // The nearest integer to a number that is never half way between two.
        const Simd::Float above = Simd::round(Simd::fma(integer, Simd::set1(1.0f / radix), Simd::set1(0.5f / radix)));
        low[v] = Simd::add(Simd::fnma(above, Simd::set1(static_cast<float>(radix)), integer), middle);
        high[v] = Simd::add(above, middle);
      });
      store_signed(reinterpret_cast<uint8_t*>(to) + j, high);
      store_signed(reinterpret_cast<uint8_t*>(to + packed_words) + j, low);
    }
  }
  // to[vector][row, half] += vectors of weight words times x, the input word of the first row's high bytes.
  template <int rows, int vectors>
  HFCA_INLINE static void add(Simd::Int* to, const Simd::Int (&words)[vectors], const uint32_t* x) {
    unroll<0, 2 * rows>([&](auto i) HFCA_INLINE {
      const auto value = broadcast(x + i * packed_words);
      unroll<0, vectors>([&](auto v) HFCA_INLINE { to[v * 2 * rows + i] = step(to[v * 2 * rows + i], words[v], value); });
    });
  }
  static Simd::Float total(const Simd::Int (&sum)[sums]) {
    return Simd::fma(Simd::to_float(sum[0]), Simd::set1(static_cast<float>(radix)), Simd::to_float(sum[1]));
  }

 private:
  // Values + radix / 2, which are bytes without a sign, as bytes with one.
  static void store_signed(uint8_t* to, const Simd::Float (&values)[4]) {
    Simd::store_bytes(to, values);
    for (int i = 0; i < 4 * Simd::width; ++i) to[i] = static_cast<uint8_t>(to[i] - radix / 2);
  }
#if defined(HFCA_SIMD_GENERIC)
  static DotInt8::Input broadcast(const uint32_t* p) {
    const auto byte = [p](int shift) { return static_cast<int32_t>(*p << (24 - shift)) >> 24; };
    return {{byte(0), byte(8), byte(16), byte(24)}};
  }
  static Simd::Int step(Simd::Int sum, Simd::Int weights, const DotInt8::Input& x) {
    return sum + x.byte[0] * (weights & 0xFF) + x.byte[1] * (weights >> 8 & 0xFF) + x.byte[2] * (weights >> 16 & 0xFF) +
           x.byte[3] * (weights >> 24 & 0xFF);
  }
#else
  static DotInt8::Input broadcast(const uint32_t* p) { return DotInt8::broadcast(p); }
#if defined(HFCA_SIMD_NEON)
  static Simd::Int step(Simd::Int sum, Simd::Int weights, DotInt8::Input x) { return DotInt8::step(sum, x, weights); }
#else
  static Simd::Int step(Simd::Int sum, Simd::Int weights, DotInt8::Input x) { return DotInt8::step(sum, weights, x); }
#endif
#endif
};
#endif

}  // namespace HFCA_TIER
