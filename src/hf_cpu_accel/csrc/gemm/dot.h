// How a tier multiplies one input word by a vector of weight words. A Dot has:
//   Words       input packing (pack.h)
//   rows        most rows of a register tile: 2 * rows accumulators + weights + broadcast must fit the register file
//   substeps    steps per weight word (2 where bfloat16 weights are widened to float32)
//   step_words  input words of one step (2 where the signs of bytes are parted from their magnitudes)
//   step(acc, input, weight), add(acc, acc)
#pragma once
#include "pack.h"

namespace HFCA_TIER {

// Weights are loaded once: gcc would repeat the load as the memory operand of each multiplication, one for every row of a tile.
template <class T>
inline T in_register(T x) {
#if defined(HFCA_SIMD_AVX2) || defined(HFCA_SIMD_AVX512)
  asm("" : "+v"(x));
#endif
  return x;
}

#if defined(HFCA_SIMD_NEON)
// NEON multiplies a vector by one lane of another: a word of the input is loaded without being spread, which would take a turn of the
// multipliers. As a float, whatever it holds, since that is the type of a word in a vector register.
struct DotLane {
  using Input = float;
  static Input broadcast(const uint32_t* p) {
    Input x;
    std::memcpy(&x, p, sizeof(x));
    return x;
  }
};
// Volatile: what is made through it stays in the order that is written, which needs no more registers than there are. gcc would load all
// operands of a block first and spill some of them, or sums for them.
inline int32x4_t in_order(int32x4_t x) {
  asm volatile("" : "+w"(x));
  return x;
}
// In inline assembly, since gcc spreads the lane all the same, for all vectors that it is multiplied by.
inline Simd::Float fma_lane(Simd::Float acc, float a, Simd::Float b) {
  asm("fmla %0.4s, %1.4s, %2.s[0]" : "+w"(acc.low) : "w"(b.low), "w"(a));
  asm("fmla %0.4s, %1.4s, %2.s[0]" : "+w"(acc.high) : "w"(b.high), "w"(a));
  return acc;
}
#endif

struct DotF32 {
  using Words = FloatWords<1>;
  using Acc = Simd::Float;
  using Weight = Simd::Float;
  static constexpr int rows = Simd::registers == 32 ? 14 : 6, substeps = 1, step_words = 1;
#if !defined(HFCA_SIMD_GENERIC)
  static constexpr int vectors = 2;
#else
  static constexpr int vectors = 1;
#endif
  static Acc add(Acc a, Acc b) { return Simd::add(a, b); }
  static Acc zero() { return Simd::zero(); }
  static Weight load(const uint32_t* p) { return in_register(Simd::load(reinterpret_cast<const float*>(p))); }
  static Weight widen(Weight w, int) { return w; }
#if defined(HFCA_SIMD_NEON)
  using Input = DotLane::Input;
  static Input broadcast(const uint32_t* p) { return DotLane::broadcast(p); }
  static Acc step(Acc acc, Input a, Weight b) { return fma_lane(acc, a, b); }
#else
  using Input = Simd::Float;
  static Input broadcast(const uint32_t* p) { return Simd::set1(*reinterpret_cast<const float*>(p)); }
  static Acc step(Acc acc, Input a, Weight b) { return Simd::fma(a, b, acc); }
#endif
  static void store(float* p, Acc acc) { Simd::store(p, acc); }
};

// bfloat16 weights, float32 input and multiply: for CPUs without a (fast) bfloat16 dot product. A weight word holds k (low) and k + 1.
struct DotBf16Widen {
  using Words = FloatWords<2>;
  using Acc = Simd::Float;
  using Input = DotF32::Input;
  static constexpr int rows = Simd::registers == 32 ? 12 : 4, substeps = 2, step_words = 1, vectors = DotF32::vectors;
  static Acc add(Acc a, Acc b) { return Simd::add(a, b); }
  static Acc zero() { return Simd::zero(); }
  static Input broadcast(const uint32_t* p) { return DotF32::broadcast(p); }
  static Acc step(Acc acc, Input a, Simd::Float b) { return DotF32::step(acc, a, b); }
  static void store(float* p, Acc acc) { Simd::store(p, acc); }
#if defined(HFCA_SIMD_AVX512)
  using Weight = __m512i;
  static Weight load(const uint32_t* p) { return in_register(_mm512_loadu_si512(p)); }
  static Simd::Float widen(Weight w, int substep) {
    return _mm512_castsi512_ps(substep == 0 ? _mm512_slli_epi32(w, 16)
                                            : _mm512_and_si512(w, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))));
  }
#elif defined(HFCA_SIMD_AVX2)
  using Weight = __m256i;
  static Weight load(const uint32_t* p) { return in_register(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static Simd::Float widen(Weight w, int substep) {
    return _mm256_castsi256_ps(substep == 0 ? _mm256_slli_epi32(w, 16)
                                            : _mm256_and_si256(w, _mm256_set1_epi32(static_cast<int>(0xFFFF0000u))));
  }
#elif defined(HFCA_SIMD_NEON)
  using Weight = Simd::Int;
  static Weight load(const uint32_t* p) { return Simd::load_int(reinterpret_cast<const int32_t*>(p)); }
  static Simd::Float widen(Weight w, int substep) { return {widen(w.low, substep), widen(w.high, substep)}; }
  static float32x4_t widen(int32x4_t w, int substep) {
    const int32x4_t mask = vdupq_n_s32(static_cast<int32_t>(0xFFFF0000u));
    return vreinterpretq_f32_s32(substep == 0 ? vshlq_n_s32(w, 16) : vandq_s32(w, mask));
  }
#else
  using Weight = Simd::Int;
  static Weight load(const uint32_t* p) { return Simd::load_int(reinterpret_cast<const int32_t*>(p)); }
  static Simd::Float widen(Weight w, int substep) {
    const Weight bits = substep == 0 ? w << 16 : w & static_cast<int32_t>(0xFFFF0000u);
    Simd::Float r;
    std::memcpy(&r, &bits, sizeof(r));
    return r;
  }
#endif
};

#if defined(__AVX512BF16__) && defined(HFCA_SIMD_AVX512)
#define HFCA_DOT_BF16 1
// vdpbf16ps: both sides in bfloat16, products and sums in float32.
struct DotBf16 {
  using Words = Bf16Words;
  using Acc = __m512;
  using Weight = __m512i;
  using Input = __m512i;
  static constexpr int rows = 14, substeps = 1, step_words = 1, vectors = 2;
  static Acc add(Acc a, Acc b) { return _mm512_add_ps(a, b); }
  static Acc zero() { return _mm512_setzero_ps(); }
  static Weight load(const uint32_t* p) { return in_register(_mm512_loadu_si512(p)); }
  static Weight widen(Weight w, int) { return w; }
  static Input broadcast(const uint32_t* p) { return _mm512_set1_epi32(static_cast<int>(*p)); }
  static Acc step(Acc acc, Input a, Weight b) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));  // see DotInt8::step
    return acc;
  }
  static void store(float* p, Acc acc) { _mm512_storeu_ps(p, acc); }
};
#endif

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) && defined(HFCA_SIMD_NEON)
#define HFCA_DOT_BF16 1
// bfdot: as vdpbf16ps.
struct DotBf16 : DotLane {
  using Words = Bf16Words;
  using Acc = Simd::Float;
  using Weight = Simd::Int;
  static constexpr int rows = 6, substeps = 1, step_words = 1, vectors = 2;
  static Acc add(Acc a, Acc b) { return Simd::add(a, b); }
  static Acc zero() { return Simd::zero(); }
  static Weight load(const uint32_t* p) { return Simd::load_int(reinterpret_cast<const int32_t*>(p)); }
  static Weight widen(Weight w, int) { return w; }
  static Acc step(Acc acc, Input a, Weight b) {
    asm("bfdot %0.4s, %1.8h, %2.2h[0]" : "+w"(acc.low) : "w"(b.low), "w"(a));
    asm("bfdot %0.4s, %1.8h, %2.2h[0]" : "+w"(acc.high) : "w"(b.high), "w"(a));
    return acc;
  }
  static void store(float* p, Acc acc) { Simd::store(p, acc); }
};
#endif

}  // namespace HFCA_TIER
