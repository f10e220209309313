// Vector wrapper of the avx512 tiers (F, BW, DQ, VL). See simd/simd.h for the interface that every tier offers.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace HFCA_TIER {

struct Simd {
  using Float = __m512;
  using Int = __m512i;
  static constexpr int width = 16;
  static constexpr int registers = 32;

  static __mmask16 mask(int n) { return static_cast<__mmask16>((1u << n) - 1u); }

  static Float zero() { return _mm512_setzero_ps(); }
  static Float set1(float x) { return _mm512_set1_ps(x); }
  static Float load(const float* p) { return _mm512_loadu_ps(p); }
  static Float load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(mask(n), p); }
  static void store(float* p, Float x) { _mm512_storeu_ps(p, x); }
  static void store_n(float* p, Float x, int n) { _mm512_mask_storeu_ps(p, mask(n), x); }

  static Float add(Float a, Float b) { return _mm512_add_ps(a, b); }
  static Float sub(Float a, Float b) { return _mm512_sub_ps(a, b); }
  static Float mul(Float a, Float b) { return _mm512_mul_ps(a, b); }
  static Float div(Float a, Float b) { return _mm512_div_ps(a, b); }
  // vmaxps/vminps return the second operand when one is NaN: keep the data there, so that NaN survives.
  static Float max(Float bound, Float x) { return _mm512_max_ps(bound, x); }
  static Float min(Float bound, Float x) { return _mm512_min_ps(bound, x); }
  static Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
  static Float fnma(Float a, Float b, Float c) { return _mm512_fnmadd_ps(a, b, c); }
  static Float rotate_pairs(Float x, Float cos, Float sin) {
    return _mm512_fmaddsub_ps(x, cos, _mm512_mul_ps(_mm512_permute_ps(x, 0xB1), sin));
  }
  static Float where_equal(Float a, Float b, Float x, Float y) { return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ), y, x); }
  static Float abs(Float x) { return _mm512_abs_ps(x); }
  static Float copysign(Float magnitude, Float sign) {
    return _mm512_castsi512_ps(
        _mm512_ternarylogic_epi32(_mm512_set1_epi32(INT32_MIN), _mm512_castps_si512(sign), _mm512_castps_si512(magnitude), 0xCA));
  }
  static Float fraction(Float x) { return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
  static Float round(Float x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  // x * 2^n for integral n; saturates to 0 and infinity.
  static Float scale_by_power_of_two(Float x, Float n) { return _mm512_scalef_ps(x, n); }
  static Float select_n(Float x, int n, Float rest) { return _mm512_mask_blend_ps(mask(n), rest, x); }
  static Float rotate(Float x, int n) {
    const Int lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_permutexvar_ps(_mm512_add_epi32(lanes, _mm512_set1_epi32(n)), x);
  }
  static Float pick(Float x, const int32_t (&lanes)[width]) { return _mm512_permutexvar_ps(_mm512_loadu_si512(lanes), x); }
  static Float swap_halves(Float x) { return _mm512_shuffle_f32x4(x, x, 0x4E); }
  static void transpose(Float (&r)[width]) {
    Float t[width];
#pragma GCC unroll 16
    for (int i = 0; i < 8; ++i) {
      t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
      t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 4; ++i) {
      r[4 * i + 0] = _mm512_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
      r[4 * i + 1] = _mm512_shuffle_ps(t[4 * i], t[4 * i + 2], 0xEE);
      r[4 * i + 2] = _mm512_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
      r[4 * i + 3] = _mm512_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xEE);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 4; ++i) {
      t[i] = _mm512_shuffle_f32x4(r[i], r[4 + i], 0x88);
      t[4 + i] = _mm512_shuffle_f32x4(r[i], r[4 + i], 0xDD);
      t[8 + i] = _mm512_shuffle_f32x4(r[8 + i], r[12 + i], 0x88);
      t[12 + i] = _mm512_shuffle_f32x4(r[8 + i], r[12 + i], 0xDD);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 4; ++i) {
      r[i] = _mm512_shuffle_f32x4(t[i], t[8 + i], 0x88);
      r[4 + i] = _mm512_shuffle_f32x4(t[4 + i], t[12 + i], 0x88);
      r[8 + i] = _mm512_shuffle_f32x4(t[i], t[8 + i], 0xDD);
      r[12 + i] = _mm512_shuffle_f32x4(t[4 + i], t[12 + i], 0xDD);
    }
  }
  static float reduce_add(Float x) { return _mm512_reduce_add_ps(x); }
  static float reduce_max(Float x) { return _mm512_reduce_max_ps(x); }
  static Float highest(Float a, Float x) { return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a), _mm512_castps_si512(x))); }
  static Float lowest(Float a, Float x) { return _mm512_castsi512_ps(_mm512_max_epu32(_mm512_castps_si512(a), _mm512_castps_si512(x))); }
  static float reduce_highest(Float x) { return as_float(_mm512_reduce_max_epi32(_mm512_castps_si512(x))); }
  static float reduce_lowest(Float x) { return as_float(static_cast<int>(_mm512_reduce_max_epu32(_mm512_castps_si512(x)))); }

  static Float load_bf16(const uint16_t* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static Float load_bf16_n(const uint16_t* p, int n) { return widen(_mm256_maskz_loadu_epi16(mask(n), p)); }
  static void store_bf16(uint16_t* p, Float x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(x)); }
  static void store_bf16_n(uint16_t* p, Float x, int n) { _mm256_mask_storeu_epi16(p, mask(n), narrow(x)); }

  static Float load_int8(const int8_t* p) { return to_float(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))); }
  static Float load_int8_n(const int8_t* p, int n) { return to_float(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(mask(n), p))); }
  static Float load_uint8(const uint8_t* p) { return to_float(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))); }
  static Float load_uint8_n(const uint8_t* p, int n) { return to_float(_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask(n), p))); }
  static void store_uint8(uint8_t* p, Float x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x)));
  }
  static void store_uint8_n(uint8_t* p, Float x, int n) { _mm_mask_storeu_epi8(p, mask(n), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x))); }
  static Float to_float(Int x) { return _mm512_cvtepi32_ps(x); }
  static Int to_int(Float x) { return _mm512_cvtps_epi32(x); }
  static Int load_int(const int32_t* p) { return _mm512_loadu_si512(p); }
  static void store_bytes(uint8_t* p, const Float (&x)[4]) {
    const Int low = _mm512_packs_epi32(_mm512_cvtps_epi32(x[0]), _mm512_cvtps_epi32(x[1]));
    const Int high = _mm512_packs_epi32(_mm512_cvtps_epi32(x[2]), _mm512_cvtps_epi32(x[3]));
    // Each quarter has four bytes of each of the four vectors.
    const Int order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_storeu_si512(p, _mm512_permutexvar_epi32(order, _mm512_packus_epi16(low, high)));
  }
  static void store_byte_rows(uint8_t* p, uint8_t* q, const Float (&x)[4], uint8_t least) {
    const Int low = _mm512_packs_epi32(_mm512_cvtps_epi32(x[0]), _mm512_cvtps_epi32(x[1]));
    const Int high = _mm512_packs_epi32(_mm512_cvtps_epi32(x[2]), _mm512_cvtps_epi32(x[3]));
    const Int order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);  // as in store_bytes
    const Int bytes = _mm512_max_epu8(_mm512_packus_epi16(low, high), _mm512_set1_epi8(static_cast<char>(least)));
    const Int rows = _mm512_permutexvar_epi32(order, bytes);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_castsi512_si256(rows));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), _mm512_extracti64x4_epi64(rows, 1));
  }
  static void store_pairs(uint32_t* p, Float low, Float high) {
    _mm512_storeu_si512(p, _mm512_mask_blend_epi16(0xAAAAAAAA, _mm512_cvtps_epi32(low), _mm512_slli_epi32(_mm512_cvtps_epi32(high), 16)));
  }
  static void store_shorts(uint32_t* p, Float x) {
    const Int order = _mm512_shuffle_epi32(_mm512_cvtps_epi32(x), _MM_PERM_DBCA);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtsepi32_epi16(order));
  }
#if defined(__AVX512BF16__)
  static Int load_bf16_words(const uint16_t* p, int n) {
    return n >= 2 * width ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi16((1u << n) - 1u, p);
  }
  static Int bf16_words(Float first, Float second) { return reinterpret_cast<Int>(_mm512_cvtne2ps_pbh(second, first)); }
  static Int bf16_couples(Float p, Float q) {
    return _mm512_mask_blend_epi16(0xAAAAAAAA, _mm512_srli_epi32(_mm512_castps_si512(p), 16), _mm512_castps_si512(q));
  }
  static void store_words(uint32_t* p, Int x) { _mm512_storeu_si512(p, x); }
  static Float words_as_floats(Int x) { return _mm512_castsi512_ps(x); }
#endif

 private:
  static float as_float(int bits) { return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(bits))); }
  static Float widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
  static __m256i narrow(Float x) {
#if defined(__AVX512BF16__)
    return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x));  // denormals become 0
#else
    const Int bits = _mm512_castps_si512(x);
    const Int odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    Int rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd), 16);
    rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7FC0));
    return _mm512_cvtepi32_epi16(rounded);
#endif
  }
};

}  // namespace HFCA_TIER
