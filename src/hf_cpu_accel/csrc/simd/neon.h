// Vector wrapper of the tiers of ARM (NEON of ARMv8.2): two registers of four lanes side by side, which makes it as wide as avx2's, and a
// register file of 16 such. Plain members, so that compilers keep them apart in registers. See simd/simd.h for the interface.
#pragma once
#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace HFCA_TIER {

struct Simd {
  static constexpr int width = 8;
  static constexpr int registers = 16;
  struct Float {
    float32x4_t low, high;
  };
  struct Int {
    int32x4_t low, high;
  };

  static Float zero() { return set1(0.0f); }
  static Float set1(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
  static Float load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
  static Float load_n(const float* p, int n) {
    if (n == width) return load(p);
    float lanes[width] = {};
    std::memcpy(lanes, p, static_cast<size_t>(n) * sizeof(float));
    return load(lanes);
  }
  static void store(float* p, Float x) {
    vst1q_f32(p, x.low);
    vst1q_f32(p + 4, x.high);
  }
  static void store_n(float* p, Float x, int n) {
    if (n == width) return store(p, x);
    float lanes[width];
    store(lanes, x);
    std::memcpy(p, lanes, static_cast<size_t>(n) * sizeof(float));
  }

  static Float add(Float a, Float b) { return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)}; }
  static Float sub(Float a, Float b) { return {vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)}; }
  static Float mul(Float a, Float b) { return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }
  static Float div(Float a, Float b) { return {vdivq_f32(a.low, b.low), vdivq_f32(a.high, b.high)}; }
  // The comparison is false for NaN: x is the result, as in the other tiers. (fmax and fmin would give NaN of either side.)
  static Float max(Float bound, Float x) {
    return {vbslq_f32(vcgtq_f32(bound.low, x.low), bound.low, x.low), vbslq_f32(vcgtq_f32(bound.high, x.high), bound.high, x.high)};
  }
  static Float min(Float bound, Float x) {
    return {vbslq_f32(vcltq_f32(bound.low, x.low), bound.low, x.low), vbslq_f32(vcltq_f32(bound.high, x.high), bound.high, x.high)};
  }
  static Float fma(Float a, Float b, Float c) { return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)}; }
  static Float fnma(Float a, Float b, Float c) { return {vfmsq_f32(c.low, a.low, b.low), vfmsq_f32(c.high, a.high, b.high)}; }
  static Float rotate_pairs(Float x, Float cos, Float sin) {
    return {rotate_pairs(x.low, cos.low, sin.low), rotate_pairs(x.high, cos.high, sin.high)};
  }
  static Float where_equal(Float a, Float b, Float x, Float y) {
    return {vbslq_f32(vceqq_f32(a.low, b.low), x.low, y.low), vbslq_f32(vceqq_f32(a.high, b.high), x.high, y.high)};
  }
  static Float abs(Float x) { return {vabsq_f32(x.low), vabsq_f32(x.high)}; }
  static Float copysign(Float magnitude, Float sign) {
    const uint32x4_t bit = vdupq_n_u32(0x80000000u);
    return {vbslq_f32(bit, sign.low, magnitude.low), vbslq_f32(bit, sign.high, magnitude.high)};
  }
  static Float fraction(Float x) { return {vsubq_f32(x.low, vrndmq_f32(x.low)), vsubq_f32(x.high, vrndmq_f32(x.high))}; }
  static Float round(Float x) { return {vrndnq_f32(x.low), vrndnq_f32(x.high)}; }
  // x * 2^n for integral n; saturates to 0 and infinity. Two steps, since 2^n alone may leave the exponent's range.
  static Float scale_by_power_of_two(Float x, Float n) {
    n = max(set1(-252.0f), min(set1(254.0f), n));
    return {scaled(x.low, vcvtq_s32_f32(n.low)), scaled(x.high, vcvtq_s32_f32(n.high))};
  }
  static Float select_n(Float x, int n, Float rest) {
    const int32x4_t low = {0, 1, 2, 3}, count = vdupq_n_s32(n);
    return {vbslq_f32(vcltq_s32(low, count), x.low, rest.low),
            vbslq_f32(vcltq_s32(vaddq_s32(low, vdupq_n_s32(4)), count), x.high, rest.high)};
  }
  static Float rotate(Float x, int n) {
    float twice[2 * width];
    store(twice, x);
    store(twice + width, x);
    return load(twice + n);
  }
  static Float pick(Float x, const int32_t (&lanes)[width]) {
    float from[width], to[width];
    store(from, x);
    for (int i = 0; i < width; ++i) to[i] = from[lanes[i]];
    return load(to);
  }
  static void transpose(Float (&r)[width]) {
    transpose4(r[0].low, r[1].low, r[2].low, r[3].low);
    transpose4(r[4].high, r[5].high, r[6].high, r[7].high);
    transpose4(r[0].high, r[1].high, r[2].high, r[3].high);
    transpose4(r[4].low, r[5].low, r[6].low, r[7].low);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const float32x4_t other = r[i].high;
      r[i].high = r[4 + i].low;
      r[4 + i].low = other;
    }
  }
  static float reduce_add(Float x) { return vaddvq_f32(vaddq_f32(x.low, x.high)); }
  static float reduce_max(Float x) { return vmaxvq_f32(vmaxq_f32(x.low, x.high)); }
  static Float highest(Float a, Float x) { return as_float({vmaxq_s32(bits(a).low, bits(x).low), vmaxq_s32(bits(a).high, bits(x).high)}); }
  static Float lowest(Float a, Float x) {
    const Int u = bits(a), v = bits(x);
    return as_float({larger(u.low, v.low), larger(u.high, v.high)});
  }
  static float reduce_highest(Float x) {
    const int32_t most = vmaxvq_s32(vmaxq_s32(bits(x).low, bits(x).high));
    return number(static_cast<uint32_t>(most));
  }
  static float reduce_lowest(Float x) { return number(vmaxvq_u32(vreinterpretq_u32_s32(larger(bits(x).low, bits(x).high)))); }

  static Float load_bf16(const uint16_t* p) { return widen(vld1q_u16(p)); }
  static Float load_bf16_n(const uint16_t* p, int n) {
    uint16_t lanes[width] = {};
    std::memcpy(lanes, p, static_cast<size_t>(n) * sizeof(uint16_t));
    return load_bf16(lanes);
  }
  static void store_bf16(uint16_t* p, Float x) { vst1q_u16(p, narrow(x)); }
  static void store_bf16_n(uint16_t* p, Float x, int n) {
    uint16_t lanes[width];
    store_bf16(lanes, x);
    std::memcpy(p, lanes, static_cast<size_t>(n) * sizeof(uint16_t));
  }
  static Int load_bf16_words(const uint16_t* p, int n) {
    uint16_t lanes[2 * width] = {};
    if (n < 2 * width) p = static_cast<const uint16_t*>(std::memcpy(lanes, p, static_cast<size_t>(n) * sizeof(uint16_t)));
    return {vreinterpretq_s32_u16(vld1q_u16(p)), vreinterpretq_s32_u16(vld1q_u16(p + width))};
  }
  static Int bf16_words(Float first, Float second) { return {vreinterpretq_s32_u16(narrow(first)), vreinterpretq_s32_u16(narrow(second))}; }
  static Int bf16_couples(Float p, Float q) {
    const uint16x8_t a = narrow(p), b = narrow(q);
    return {vreinterpretq_s32_u16(vzip1q_u16(a, b)), vreinterpretq_s32_u16(vzip2q_u16(a, b))};
  }
  static void store_words(uint32_t* p, Int x) {
    vst1q_s32(reinterpret_cast<int32_t*>(p), x.low);
    vst1q_s32(reinterpret_cast<int32_t*>(p + 4), x.high);
  }
  static Float words_as_floats(Int x) { return as_float(x); }

  static Float load_int8(const int8_t* p) { return to_float(load_bytes(p)); }
  static Float load_int8_n(const int8_t* p, int n) {
    int8_t lanes[width] = {};
    std::memcpy(lanes, p, static_cast<size_t>(n));
    return load_int8(lanes);
  }
  static Int load_bytes(const int8_t* p) {
    const int16x8_t pairs = vmovl_s8(vld1_s8(p));
    return {vmovl_s16(vget_low_s16(pairs)), vmovl_high_s16(pairs)};
  }
  static Float load_uint8(const uint8_t* p) {
    const uint16x8_t pairs = vmovl_u8(vld1_u8(p));
    return {vcvtq_f32_u32(vmovl_u16(vget_low_u16(pairs))), vcvtq_f32_u32(vmovl_high_u16(pairs))};
  }
  static Float load_uint8_n(const uint8_t* p, int n) {
    uint8_t lanes[width] = {};
    std::memcpy(lanes, p, static_cast<size_t>(n));
    return load_uint8(lanes);
  }
  static void store_uint8(uint8_t* p, Float x) { vst1_u8(p, vqmovn_u16(whole(x))); }
  static void store_uint8_n(uint8_t* p, Float x, int n) {
    uint8_t lanes[width];
    store_uint8(lanes, x);
    std::memcpy(p, lanes, static_cast<size_t>(n));
  }
  static Float to_float(Int x) { return {vcvtq_f32_s32(x.low), vcvtq_f32_s32(x.high)}; }
  static Int load_int(const int32_t* p) { return {vld1q_s32(p), vld1q_s32(p + 4)}; }
  static void store_bytes(uint8_t* p, const Float (&x)[4]) {
    vst1q_u8(p, vqmovn_high_u16(vqmovn_u16(whole(x[0])), whole(x[1])));
    vst1q_u8(p + 16, vqmovn_high_u16(vqmovn_u16(whole(x[2])), whole(x[3])));
  }
  // The same, less 128.
  static void store_signed_bytes(uint8_t* p, const Float (&x)[4]) {
    store_bytes(p, x);
    for (int i = 0; i < 4 * width; i += 16) vst1q_u8(p + i, veorq_u8(vld1q_u8(p + i), vdupq_n_u8(0x80)));
  }

 private:
  static float number(uint32_t x) {
    float r;
    std::memcpy(&r, &x, sizeof(r));
    return r;
  }
  static Int bits(Float x) { return {vreinterpretq_s32_f32(x.low), vreinterpretq_s32_f32(x.high)}; }
  static Float as_float(Int x) { return {vreinterpretq_f32_s32(x.low), vreinterpretq_f32_s32(x.high)}; }
  static int32x4_t larger(int32x4_t a, int32x4_t b) {
    return vreinterpretq_s32_u32(vmaxq_u32(vreinterpretq_u32_s32(a), vreinterpretq_u32_s32(b)));
  }
  static float32x4_t rotate_pairs(float32x4_t x, float32x4_t cos, float32x4_t sin) {
    const uint32x4_t even = {0x80000000u, 0, 0x80000000u, 0};
    const float32x4_t other = vreinterpretq_f32_u32(veorq_u32(vreinterpretq_u32_f32(vrev64q_f32(x)), even));
    return vfmaq_f32(vmulq_f32(other, sin), x, cos);
  }
  static float32x4_t scaled(float32x4_t x, int32x4_t n) {
    const int32x4_t half = vshrq_n_s32(n, 1);
    return vmulq_f32(vmulq_f32(x, power_of_two(half)), power_of_two(vsubq_s32(n, half)));
  }
  static float32x4_t power_of_two(int32x4_t n) { return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23)); }
  static void transpose4(float32x4_t& a, float32x4_t& b, float32x4_t& c, float32x4_t& d) {
    const float64x2_t ab = vreinterpretq_f64_f32(vtrn1q_f32(a, b)), ba = vreinterpretq_f64_f32(vtrn2q_f32(a, b));
    const float64x2_t cd = vreinterpretq_f64_f32(vtrn1q_f32(c, d)), dc = vreinterpretq_f64_f32(vtrn2q_f32(c, d));
    a = vreinterpretq_f32_f64(vtrn1q_f64(ab, cd));
    b = vreinterpretq_f32_f64(vtrn1q_f64(ba, dc));
    c = vreinterpretq_f32_f64(vtrn2q_f64(ab, cd));
    d = vreinterpretq_f32_f64(vtrn2q_f64(ba, dc));
  }
  static Float widen(uint16x8_t x) {
    return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(x), 16)), vreinterpretq_f32_u32(vshll_high_n_u16(x, 16))};
  }
  // To bfloat16, nearest even.
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  static uint16x8_t narrow(Float x) { return vreinterpretq_u16_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(x.low), x.high)); }
#else
  static uint16x8_t narrow(Float x) { return vuzp2q_u16(rounded(x.low), rounded(x.high)); }
  // In the upper halves.
  static uint16x8_t rounded(float32x4_t x) {
    const uint32x4_t bits = vreinterpretq_u32_f32(x), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t nearest = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7FFF)), odd);
    return vreinterpretq_u16_u32(vbslq_u32(vceqq_f32(x, x), nearest, vdupq_n_u32(0x7FC00000)));
  }
#endif
  // Rounded to uint16, what is out of its range to its ends; NaN is 0.
  static uint16x8_t whole(Float x) { return vqmovun_high_s32(vqmovun_s32(vcvtnq_s32_f32(x.low)), vcvtnq_s32_f32(x.high)); }
};

}  // namespace HFCA_TIER
