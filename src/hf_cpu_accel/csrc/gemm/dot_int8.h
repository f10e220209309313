// The same of integers: dot.h.
#pragma once
#include "dot.h"

namespace HFCA_TIER {

// int8: uint8 input times int8 weights, int32 sums. Without VNNI the pairwise int16 sums of vpmaddubsw would saturate (ao PR 4266 describes
// the trap): DotInt8Signs.
//
// The sums are added in inline assembly: with the intrinsics, which work on another vector type than __m512i, gcc 12 copies and spills
// its accumulators. A third of the AVX2 loop were moves.
struct DotInt8 {
  static constexpr int substeps = 1, step_words = 1;
  static constexpr int steps = 253;  // of the input's range: ByteWords
#if defined(HFCA_SIMD_AVX512)
  using Acc = __m512i;
  using Weight = __m512i;
  using Input = __m512i;
  static constexpr int vectors = 2;
  static Acc add(Acc a, Acc b) { return _mm512_add_epi32(a, b); }
  static Acc zero() { return _mm512_setzero_si512(); }
  static Weight load(const uint32_t* p) { return in_register(_mm512_loadu_si512(p)); }
  static Input broadcast(const uint32_t* p) { return _mm512_set1_epi32(static_cast<int>(*p)); }
  static void store(float* p, Acc acc) { _mm512_storeu_ps(p, _mm512_cvtepi32_ps(acc)); }
#if defined(__AVX512VNNI__)
  static constexpr int rows = 14;
  static Acc step(Acc acc, Input a, Weight b) {
    asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
    return acc;
  }
#endif
#elif defined(HFCA_SIMD_AVX2)
  using Acc = __m256i;
  using Weight = __m256i;
  using Input = __m256i;
  static constexpr int vectors = 2;
  static Acc add(Acc a, Acc b) { return _mm256_add_epi32(a, b); }
  static Acc zero() { return _mm256_setzero_si256(); }
  static Weight load(const uint32_t* p) { return in_register(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static Input broadcast(const uint32_t* p) { return _mm256_set1_epi32(static_cast<int>(*p)); }
  static void store(float* p, Acc acc) { _mm256_storeu_ps(p, _mm256_cvtepi32_ps(acc)); }
#if defined(__AVXVNNI__)
  static constexpr int rows = 6;
  static Acc step(Acc acc, Input a, Weight b) {
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(a), "x"(b));  // without the prefix it would be AVX-512's
    return acc;
  }
#endif
#elif defined(HFCA_SIMD_NEON)
  // Both sides have a sign here: see packed_less.
  using Acc = Simd::Int;
  using Weight = Simd::Int;
  using Input = DotLane::Input;
  static constexpr int rows = 6, vectors = 2;
  static Acc add(Acc a, Acc b) { return {vaddq_s32(a.low, b.low), vaddq_s32(a.high, b.high)}; }
  static Acc zero() { return {vdupq_n_s32(0), vdupq_n_s32(0)}; }
  static Weight load(const uint32_t* p) { return Simd::load_int(reinterpret_cast<const int32_t*>(p)); }
  static Input broadcast(const uint32_t* p) { return DotLane::broadcast(p); }
  static Acc step(Acc acc, Input a, Weight b) {
    asm("sdot %0.4s, %1.16b, %2.4b[0]" : "+w"(acc.low) : "w"(b.low), "w"(a));
    asm("sdot %0.4s, %1.16b, %2.4b[0]" : "+w"(acc.high) : "w"(b.high), "w"(a));
    return acc;
  }
  static void store(float* p, Acc acc) { Simd::store(p, Simd::to_float(acc)); }
#else
  using Acc = Simd::Int;
  using Weight = Simd::Int;  // four bytes per lane
  struct Input {
    int32_t byte[4];
  };
  static constexpr int rows = 4, vectors = 1;
  static Acc add(Acc a, Acc b) { return a + b; }
  static Acc zero() { return Acc{}; }
  static Weight load(const uint32_t* p) { return Simd::load_int(reinterpret_cast<const int32_t*>(p)); }
  static Input broadcast(const uint32_t* p) {
    return {{static_cast<int32_t>(*p & 0xFF), static_cast<int32_t>(*p >> 8 & 0xFF), static_cast<int32_t>(*p >> 16 & 0xFF),
             static_cast<int32_t>(*p >> 24)}};
  }
  static Acc step(Acc acc, Input a, Weight b) {
    return acc + a.byte[0] * (b << 24 >> 24) + a.byte[1] * (b << 16 >> 24) + a.byte[2] * (b << 8 >> 24) + a.byte[3] * (b >> 24);
  }
  static void store(float* p, Acc acc) { Simd::store(p, Simd::to_float(acc)); }
#endif
  // NOLINTNEXTLINE(bugprone-return-const-ref-from-parameter): the word that is read is named by who calls.
  static const Weight& widen(const Weight& w, int) { return w; }
  using Words = ByteWords<steps>;
};

#if HFCA_WITHOUT_VNNI
#define HFCA_WITHOUT_VNNI 1
// int8 weights widened to int16, input of 16 bits: for CPUs without VNNI, where bytes would have to pass twice for so much. Two of the four
// features of a weight word meet one word of the input: the even ones first, then the odd ones (Simd::store_shorts). A sum of
// `features_at_once` fits 32 bits: 512 * 32767 * 127 < 2^31.
struct DotInt8Widen : DotInt8 {
  static constexpr int rows = Simd::registers == 32 ? 12 : 5, substeps = 2, features_at_once = 512;
#if defined(HFCA_SIMD_AVX512)
  static Weight widen(Weight w, int substep) { return _mm512_srai_epi16(substep == 0 ? _mm512_slli_epi16(w, 8) : w, 8); }
  static Weight widen_unsigned(Weight w, int substep) {
    return substep == 0 ? _mm512_and_si512(w, _mm512_set1_epi16(0xFF)) : _mm512_srli_epi16(w, 8);
  }
  static Acc step(Acc acc, Input a, Weight b) {
    asm("vpaddd %1, %0, %0" : "+v"(acc) : "v"(_mm512_madd_epi16(a, b)));
    return acc;
  }
#else
  static Weight widen(Weight w, int substep) { return _mm256_srai_epi16(substep == 0 ? _mm256_slli_epi16(w, 8) : w, 8); }
  static Weight widen_unsigned(Weight w, int substep) {
    return substep == 0 ? _mm256_and_si256(w, _mm256_set1_epi16(0xFF)) : _mm256_srli_epi16(w, 8);
  }
  static Acc step(Acc acc, Input a, Weight b) {
    asm("vpaddd %1, %0, %0" : "+x"(acc) : "x"(_mm256_madd_epi16(a, b)));
    return acc;
  }
#endif
};
#endif

#if HFCA_VNNI || HFCA_WITHOUT_VNNI
#define HFCA_DOT_INT16 1
// Two int16 by two int16 per word, int32 sums: twice the rate of float32. For attention, which packs its words itself.
struct DotInt16 : DotInt8 {
  static constexpr int rows = DotF32::rows;
  static Acc step(Acc acc, Input a, Weight b) {
#if HFCA_WITHOUT_VNNI
    return DotInt8Widen::step(acc, a, b);
#elif defined(HFCA_SIMD_AVX512)
    asm("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
#else
    asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(acc) : "x"(a), "x"(b));
#endif
    return acc;
  }
};
#endif

}  // namespace HFCA_TIER
