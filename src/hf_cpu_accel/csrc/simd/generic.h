// Vector wrapper of the generic tier: the compiler's own vector type, no intrinsics, for any CPU (SSE2 or NEON code, as its baseline has).
// See simd/simd.h for the interface that every tier offers.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace HFCA_TIER {

struct Simd {
  static constexpr int width = 8;
  static constexpr int registers = 16;
  typedef float Float __attribute__((vector_size(32)));
  typedef int32_t Int __attribute__((vector_size(32)));

  static Float zero() { return Float{}; }
  static Float set1(float x) { return Float{x, x, x, x, x, x, x, x}; }
  static Float load(const float* p) {
    Float r;
    std::memcpy(&r, p, sizeof(r));
    return r;
  }
  static Float load_n(const float* p, int n) {
    Float r = zero();
    for (int i = 0; i < n; ++i) r[i] = p[i];
    return r;
  }
  static void store(float* p, Float x) { std::memcpy(p, &x, sizeof(x)); }
  static void store_n(float* p, Float x, int n) {
    for (int i = 0; i < n; ++i) p[i] = x[i];
  }

  static Float add(Float a, Float b) { return a + b; }
  static Float sub(Float a, Float b) { return a - b; }
  static Float mul(Float a, Float b) { return a * b; }
  static Float div(Float a, Float b) { return a / b; }
  // The comparison is false for NaN, so that NaN data survives, as in the other tiers.
  static Float max(Float bound, Float x) { return bound > x ? bound : x; }
  static Float min(Float bound, Float x) { return bound < x ? bound : x; }
  static Float fma(Float a, Float b, Float c) { return a * b + c; }
  static Float fnma(Float a, Float b, Float c) { return c - a * b; }
  static Float rotate_pairs(Float x, Float cos, Float sin) {
    Float r;
    for (int i = 0; i < width; i += 2) r[i] = x[i] * cos[i] - x[i + 1] * sin[i], r[i + 1] = x[i + 1] * cos[i + 1] + x[i] * sin[i + 1];
    return r;
  }
  static Float where_equal(Float a, Float b, Float x, Float y) { return a == b ? x : y; }
  static Float abs(Float x) { return as_float(bits(x) & 0x7FFFFFFF); }
  static Float copysign(Float magnitude, Float sign) { return as_float((bits(magnitude) & 0x7FFFFFFF) | (bits(sign) & INT32_MIN)); }
  // To nearest even: adding 1.5 * 2^23 leaves no fraction bits. Larger numbers are integral already (and NaN stays).
  static Float round(Float x) {
    const Float shift = set1(12582912.0f), rounded = (x + shift) - shift;
    return abs(x) < set1(4194304.0f) ? rounded : x;
  }
  // x * 2^n for integral n; saturates to 0 and infinity. Two steps, since 2^n alone may leave the exponent's range.
  static Float scale_by_power_of_two(Float x, Float n) {
    n = max(set1(-252.0f), min(set1(254.0f), n));
    const Int whole = __builtin_convertvector(n == n ? n : zero(), Int), half = whole >> 1;
    return x * power_of_two(half) * power_of_two(whole - half);
  }
  static Float select_n(Float x, int n, Float rest) {
    for (int i = n; i < width; ++i) x[i] = rest[i];
    return x;
  }
  static Float rotate(Float x, int n) {
    Float r;
    for (int i = 0; i < width; ++i) r[i] = x[(i + n) % width];
    return r;
  }
  static Float pick(Float x, const int32_t (&lanes)[width]) {
    Float r;
    for (int i = 0; i < width; ++i) r[i] = x[lanes[i]];
    return r;
  }
  static void transpose(Float (&r)[width]) {
    for (int i = 0; i < width; ++i)
      for (int j = 0; j < i; ++j) {
        const float swapped = r[i][j];
        r[i][j] = r[j][i];
        r[j][i] = swapped;
      }
  }
  static float reduce_add(Float x) { return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7])); }
  static float reduce_max(Float x) {
    float m = x[0];
    for (int i = 1; i < width; ++i) m = x[i] > m ? x[i] : m;
    return m;
  }

  static Float load_bf16(const uint16_t* p) { return load_bf16_n(p, width); }
  static Float load_bf16_n(const uint16_t* p, int n) {
    Int r = Int{};
    for (int i = 0; i < n; ++i) r[i] = static_cast<int32_t>(static_cast<uint32_t>(p[i]) << 16);
    return as_float(r);
  }
  static void store_bf16(uint16_t* p, Float x) { store_bf16_n(p, x, width); }
  static void store_bf16_n(uint16_t* p, Float x, int n) {
    for (int i = 0; i < n; ++i) {
      const uint32_t lane = static_cast<uint32_t>(bits(x)[i]);
      p[i] = x[i] != x[i] ? 0x7FC0 : static_cast<uint16_t>((lane + 0x7FFF + ((lane >> 16) & 1)) >> 16);
    }
  }

  static Float load_int8(const int8_t* p) { return load_int8_n(p, width); }
  static Float load_int8_n(const int8_t* p, int n) {
    Float r = zero();
    for (int i = 0; i < n; ++i) r[i] = static_cast<float>(p[i]);
    return r;
  }
  static Float load_uint8(const uint8_t* p) { return load_uint8_n(p, width); }
  static Float load_uint8_n(const uint8_t* p, int n) {
    Float r = zero();
    for (int i = 0; i < n; ++i) r[i] = static_cast<float>(p[i]);
    return r;
  }
  static void store_uint8(uint8_t* p, Float x) { store_uint8_n(p, x, width); }
  static void store_uint8_n(uint8_t* p, Float x, int n) {
    const Int whole = __builtin_convertvector(round(x == x ? x : zero()), Int);
    for (int i = 0; i < n; ++i) p[i] = static_cast<uint8_t>(whole[i]);
  }
  static Float to_float(Int x) { return __builtin_convertvector(x, Float); }
  static Int load_int(const int32_t* p) {
    Int r;
    std::memcpy(&r, p, sizeof(r));
    return r;
  }
  static Float highest(Float a, Float x) { return bits(a) > bits(x) ? a : x; }
  static Float lowest(Float a, Float x) { return (bits(a) ^ INT32_MIN) > (bits(x) ^ INT32_MIN) ? a : x; }
  static float reduce_highest(Float x) {
    Float best = x;
    for (int i = 1; i < width; ++i) best = highest(best, set1(x[i]));
    return best[0];
  }
  static float reduce_lowest(Float x) {
    Float best = x;
    for (int i = 1; i < width; ++i) best = lowest(best, set1(x[i]));
    return best[0];
  }
  static void store_bytes(uint8_t* p, const Float (&x)[4]) {
    for (int v = 0; v < 4; ++v) {
      const Int whole = __builtin_convertvector(round(abs(x[v]) < set1(4194304.0f) ? x[v] : zero()), Int);
      for (int i = 0; i < width; ++i) p[v * width + i] = static_cast<uint8_t>(whole[i]);
    }
  }

 private:
  static Int bits(Float x) {
    Int r;
    std::memcpy(&r, &x, sizeof(r));
    return r;
  }
  static Float as_float(Int x) {
    Float r;
    std::memcpy(&r, &x, sizeof(r));
    return r;
  }
  static Float power_of_two(Int n) { return as_float((n + 127) << 23); }
};

}  // namespace HFCA_TIER
