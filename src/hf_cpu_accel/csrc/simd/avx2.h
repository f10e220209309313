// Vector wrapper of the avx2 tiers (AVX2, FMA, F16C). See simd/simd.h for the interface that every tier offers.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace HFCA_TIER {

struct Simd {
  using Float = __m256;
  using Int = __m256i;
  static constexpr int width = 8;
  static constexpr int registers = 16;

  static __m256i mask(int n) { return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)); }

  static Float zero() { return _mm256_setzero_ps(); }
  static Float set1(float x) { return _mm256_set1_ps(x); }
  static Float load(const float* p) { return _mm256_loadu_ps(p); }
  static Float load_n(const float* p, int n) { return _mm256_maskload_ps(p, mask(n)); }
  static void store(float* p, Float x) { _mm256_storeu_ps(p, x); }
  static void store_n(float* p, Float x, int n) {
    if (n == width) store(p, x);  // a masked store is microcode on Zen 1 to 3
    else _mm256_maskstore_ps(p, mask(n), x);
  }

  static Float add(Float a, Float b) { return _mm256_add_ps(a, b); }
  static Float sub(Float a, Float b) { return _mm256_sub_ps(a, b); }
  static Float mul(Float a, Float b) { return _mm256_mul_ps(a, b); }
  static Float div(Float a, Float b) { return _mm256_div_ps(a, b); }
  // vmaxps/vminps return the second operand when one is NaN: keep the data there, so that NaN survives.
  static Float max(Float bound, Float x) { return _mm256_max_ps(bound, x); }
  static Float min(Float bound, Float x) { return _mm256_min_ps(bound, x); }
  static Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
  static Float fnma(Float a, Float b, Float c) { return _mm256_fnmadd_ps(a, b, c); }
  static Float rotate_pairs(Float x, Float cos, Float sin) {
    return _mm256_fmaddsub_ps(x, cos, _mm256_mul_ps(_mm256_permute_ps(x, 0xB1), sin));
  }
  static Float where_equal(Float a, Float b, Float x, Float y) { return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_EQ_OQ)); }
  static Float abs(Float x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
  static Float copysign(Float magnitude, Float sign) {
    const Float bit = _mm256_set1_ps(-0.0f);
    return _mm256_or_ps(_mm256_and_ps(bit, sign), _mm256_andnot_ps(bit, magnitude));
  }
  static Float fraction(Float x) { return sub(x, _mm256_floor_ps(x)); }
  static Float round(Float x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  // x * 2^n for integral n; saturates to 0 and infinity. Two steps, since 2^n alone may leave the exponent's range.
  static Float scale_by_power_of_two(Float x, Float n) {
    n = _mm256_max_ps(_mm256_set1_ps(-252.0f), _mm256_min_ps(_mm256_set1_ps(254.0f), n));
    const Int whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1);
    return mul(mul(x, power_of_two(half)), power_of_two(_mm256_sub_epi32(whole, half)));
  }
  static Float select_n(Float x, int n, Float rest) { return _mm256_blendv_ps(rest, x, _mm256_castsi256_ps(mask(n))); }
  static Float rotate(Float x, int n) {
    return _mm256_permutevar8x32_ps(x, _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(n)));
  }
  static Float pick(Float x, const int32_t (&lanes)[width]) {
    return _mm256_permutevar8x32_ps(x, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(lanes)));
  }
  static void transpose(Float (&r)[width]) {
    Float t[width];
#pragma GCC unroll 8
    for (int i = 0; i < 4; ++i) {
      t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
      t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 2; ++i) {
      r[4 * i + 0] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
      r[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xEE);
      r[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
      r[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xEE);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 4; ++i) {
      t[i] = _mm256_permute2f128_ps(r[i], r[4 + i], 0x20);
      t[4 + i] = _mm256_permute2f128_ps(r[i], r[4 + i], 0x31);
    }
#pragma GCC unroll 8
    for (int i = 0; i < width; ++i) r[i] = t[i];
  }
  static float reduce_add(Float x) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
  }
  static float reduce_max(Float x) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
  }
  static Float highest(Float a, Float x) { return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(a), _mm256_castps_si256(x))); }
  static Float lowest(Float a, Float x) { return _mm256_castsi256_ps(_mm256_max_epu32(_mm256_castps_si256(a), _mm256_castps_si256(x))); }
  static float reduce_highest(Float x) {
    return reduce_bits(x, [](__m128i a, __m128i b) { return _mm_max_epi32(a, b); });
  }
  static float reduce_lowest(Float x) {
    return reduce_bits(x, [](__m128i a, __m128i b) { return _mm_max_epu32(a, b); });
  }

  static Float load_bf16(const uint16_t* p) { return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static Float load_bf16_n(const uint16_t* p, int n) {
    uint16_t lanes[8] = {};
    std::memcpy(lanes, p, static_cast<size_t>(n) * sizeof(uint16_t));
    return load_bf16(lanes);
  }
  static void store_bf16(uint16_t* p, Float x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow(x)); }
  static void store_bf16_n(uint16_t* p, Float x, int n) {
    uint16_t lanes[8];
    store_bf16(lanes, x);
    std::memcpy(p, lanes, static_cast<size_t>(n) * sizeof(uint16_t));
  }

  static Float load_int8(const int8_t* p) { return to_float(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))); }
  static Float load_int8_n(const int8_t* p, int n) {
    int8_t lanes[8] = {};
    std::memcpy(lanes, p, static_cast<size_t>(n));
    return load_int8(lanes);
  }
  static Float load_uint8(const uint8_t* p) { return to_float(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))); }
  static Float load_uint8_n(const uint8_t* p, int n) {
    uint8_t lanes[8] = {};
    std::memcpy(lanes, p, static_cast<size_t>(n));
    return load_uint8(lanes);
  }
  static void store_uint8(uint8_t* p, Float x) {
    const Int whole = _mm256_cvtps_epi32(x);
    const __m128i pairs = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(pairs, pairs));
  }
  static void store_uint8_n(uint8_t* p, Float x, int n) {
    uint8_t lanes[8];
    store_uint8(lanes, x);
    std::memcpy(p, lanes, static_cast<size_t>(n));
  }
  static Float to_float(Int x) { return _mm256_cvtepi32_ps(x); }
  static Int to_int(Float x) { return _mm256_cvtps_epi32(x); }
  static Int load_int(const int32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static void store_bytes(uint8_t* p, const Float (&x)[4]) {
    const Int low = _mm256_packs_epi32(_mm256_cvtps_epi32(x[0]), _mm256_cvtps_epi32(x[1]));
    const Int high = _mm256_packs_epi32(_mm256_cvtps_epi32(x[2]), _mm256_cvtps_epi32(x[3]));
    // Each half has four bytes of each of the four vectors.
    const Int order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order));
  }
  static void store_pairs(uint32_t* p, Float low, Float high) {
    const Int shifted = _mm256_slli_epi32(_mm256_cvtps_epi32(high), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_blend_epi16(_mm256_cvtps_epi32(low), shifted, 0xAA));
  }
  static void store_shorts(uint32_t* p, Float x) {
    const Int order = _mm256_shuffle_epi32(_mm256_cvtps_epi32(x), 0xD8);
    const __m128i shorts = _mm_packs_epi32(_mm256_castsi256_si128(order), _mm256_extracti128_si256(order, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), shorts);
  }

 private:
  template <class Larger>
  static float reduce_bits(Float x, Larger larger) {
    const __m256i bits = _mm256_castps_si256(x);
    __m128i m = larger(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
    m = larger(m, _mm_shuffle_epi32(m, 0x4E));
    return _mm_cvtss_f32(_mm_castsi128_ps(larger(m, _mm_shuffle_epi32(m, 0xB1))));
  }
  static Float power_of_two(Int n) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23)); }
  static Float widen(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
  static __m128i narrow(Float x) {
    const Int bits = _mm256_castps_si256(x);
    const Int odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    Int rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd), 16);
    const Int nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7FC0), nan);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0x08);
    return _mm256_castsi256_si128(packed);
  }
};

}  // namespace HFCA_TIER
