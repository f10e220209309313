// Vector wrapper of the generic tier: plain loops without intrinsics, for any CPU (the compiler vectorises them for its baseline).
// See simd/simd.h for the interface that every tier offers.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace HFCA_TIER {

struct Simd {
  static constexpr int width = 8;
  static constexpr int registers = 16;
  struct Float { float lane[width]; };
  struct Int { int32_t lane[width]; };

  static Float zero() { return set1(0.0f); }
  static Float set1(float x) {
    Float r;
    for (float& lane : r.lane) lane = x;
    return r;
  }
  static Float load(const float* p) {
    Float r;
    std::memcpy(r.lane, p, sizeof(r.lane));
    return r;
  }
  static Float load_n(const float* p, int n) {
    Float r = zero();
    for (int i = 0; i < n; ++i) r.lane[i] = p[i];
    return r;
  }
  static void store(float* p, Float x) { std::memcpy(p, x.lane, sizeof(x.lane)); }
  static void store_n(float* p, Float x, int n) {
    for (int i = 0; i < n; ++i) p[i] = x.lane[i];
  }

  static Float add(Float a, Float b) { return zip(a, b, [](float x, float y) { return x + y; }); }
  static Float sub(Float a, Float b) { return zip(a, b, [](float x, float y) { return x - y; }); }
  static Float mul(Float a, Float b) { return zip(a, b, [](float x, float y) { return x * y; }); }
  static Float div(Float a, Float b) { return zip(a, b, [](float x, float y) { return x / y; }); }
  // The comparison is false for NaN, so that NaN data survives, as in the other tiers.
  static Float max(Float bound, Float x) { return zip(bound, x, [](float b, float y) { return b > y ? b : y; }); }
  static Float min(Float bound, Float x) { return zip(bound, x, [](float b, float y) { return b < y ? b : y; }); }
  static Float fma(Float a, Float b, Float c) { return add(mul(a, b), c); }
  static Float fnma(Float a, Float b, Float c) { return sub(c, mul(a, b)); }
  static Float abs(Float x) { return each(x, [](float v) { return std::fabs(v); }); }
  static Float copysign(Float magnitude, Float sign) { return zip(magnitude, sign, [](float m, float s) { return std::copysign(m, s); }); }
  static Float round(Float x) { return each(x, [](float v) { return std::nearbyint(v); }); }
  // x * 2^n for integral n; saturates to 0 and infinity.
  static Float scale_by_power_of_two(Float x, Float n) {
    n = max(set1(-300.0f), min(set1(300.0f), n));
    return zip(x, n, [](float v, float e) { return std::isnan(e) ? e : std::ldexp(v, static_cast<int>(e)); });
  }
  static float reduce_add(Float x) {
    float s = 0.0f;
    for (float lane : x.lane) s += lane;
    return s;
  }
  static float reduce_max(Float x) {
    float m = x.lane[0];
    for (float lane : x.lane) m = lane > m ? lane : m;
    return m;
  }

  static Float load_bf16(const uint16_t* p) { return load_bf16_n(p, width); }
  static Float load_bf16_n(const uint16_t* p, int n) {
    Float r = zero();
    for (int i = 0; i < n; ++i) {
      const uint32_t bits = static_cast<uint32_t>(p[i]) << 16;
      std::memcpy(&r.lane[i], &bits, sizeof(bits));
    }
    return r;
  }
  static void store_bf16(uint16_t* p, Float x) { store_bf16_n(p, x, width); }
  static void store_bf16_n(uint16_t* p, Float x, int n) {
    for (int i = 0; i < n; ++i) {
      uint32_t bits;
      std::memcpy(&bits, &x.lane[i], sizeof(bits));
      p[i] = std::isnan(x.lane[i]) ? 0x7FC0 : static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
    }
  }

  static Float to_float(Int x) {
    Float r;
    for (int i = 0; i < width; ++i) r.lane[i] = static_cast<float>(x.lane[i]);
    return r;
  }
  static Int load_int(const int32_t* p) {
    Int r;
    std::memcpy(r.lane, p, sizeof(r.lane));
    return r;
  }
  // Rounds to the nearest integer and stores the low byte of each lane.
  static void store_bytes_n(uint8_t* p, Float x, int n) {
    for (int i = 0; i < n; ++i) p[i] = std::isfinite(x.lane[i]) ? static_cast<uint8_t>(static_cast<int32_t>(std::nearbyint(x.lane[i]))) : 0;
  }

 private:
  template <class F>
  static Float each(Float a, F f) {
    for (float& lane : a.lane) lane = f(lane);
    return a;
  }
  template <class F>
  static Float zip(Float a, Float b, F f) {
    for (int i = 0; i < width; ++i) a.lane[i] = f(a.lane[i], b.lane[i]);
    return a;
  }
};

}  // namespace HFCA_TIER
