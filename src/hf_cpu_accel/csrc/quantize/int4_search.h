// The four-bit weights nearest to given ones, as int4.quantize finds them: per group, the multiplier of least squared error among a few.
#pragma once
#include <cstring>

#include "../simd/simd.h"
#include "../simd/unroll.h"
#include "int4.h"

namespace HFCA_TIER {

// Of the level nearest to each value, counted from the level 0. Beyond 5 and -6 levels are two apart.
inline Simd::Float nearest_level(Simd::Float x) {
  const Simd::Float half = Simd::mul(x, Simd::set1(0.5f));
  const Simd::Float bent = Simd::max(Simd::sub(half, Simd::set1(3.0f)), Simd::min(Simd::add(half, Simd::set1(2.5f)), x));
  return Simd::max(Simd::set1(-8.0f), Simd::min(Simd::set1(7.0f), Simd::round(bent)));
}

inline Simd::Float level_at(Simd::Float index) {
  const Simd::Float twice = Simd::add(index, index);
  return Simd::min(Simd::add(twice, Simd::set1(6.0f)), Simd::max(Simd::sub(twice, Simd::set1(5.0f)), index));
}

// One group of `vectors` vectors, in steps of the row's scale. Writes its index bytes, adds its integers to `sum` and returns the
// multiplier.
template <int vectors>
inline float quantize_group(const float* weight, Simd::Float inverse, uint8_t* index, float& sum) {
  constexpr float from_level[2] = {10.5f, 9.5f}, largest_multiplier = 12.0f;
  constexpr int tried = 4;
  Simd::Float x[vectors], low = Simd::zero(), high = Simd::zero();
  unroll<0, vectors>([&](auto v) HFCA_INLINE {
    x[v] = Simd::mul(Simd::load(weight + v * Simd::width), inverse);
    low = Simd::min(low, x[v]);
    high = Simd::max(high, x[v]);
  });
  const float below = Simd::reduce_max(Simd::sub(Simd::zero(), low)), above = Simd::reduce_max(high),
              largest = below > above ? below : above;
  float best = 3.0e38f, multiplier = 1.0f, sign = below >= above ? 1.0f : -1.0f;
  for (int side = 0; side < 2; ++side, sign = -sign) {
    float first = static_cast<float>(static_cast<int>(largest / from_level[side]));
    first = first < 1.0f ? 1.0f : first > largest_multiplier ? largest_multiplier : first;
    for (int more = 0; more < tried && first + static_cast<float>(more) <= largest_multiplier; ++more) {
      const float candidate = sign * (first + static_cast<float>(more));
      const Simd::Float m = Simd::set1(candidate), part = Simd::set1(1.0f / candidate);
      Simd::Float errors = Simd::zero();
      unroll<0, vectors>([&](auto v) HFCA_INLINE {
        const Simd::Float off = Simd::fnma(level_at(nearest_level(Simd::mul(x[v], part))), m, x[v]);
        errors = Simd::fma(off, off, errors);
      });
      const float error = Simd::reduce_add(errors);
      if (error < best) best = error, multiplier = candidate;
    }
  }
  const Simd::Float part = Simd::set1(1.0f / multiplier), zero = Simd::set1(8.0f);
  Simd::Float levels = Simd::zero();
  uint8_t bytes[(vectors + 3) / 4 * 4 * Simd::width];  // a group may be half of what is stored at a time
  for (int first = 0; first < vectors; first += 4) {
    Simd::Float together[4];
    for (int v = 0; v < 4; ++v) {
      const Simd::Float nearest = first + v < vectors ? nearest_level(Simd::mul(x[first + v], part)) : Simd::zero();
      together[v] = Simd::add(nearest, zero);
      levels = Simd::add(levels, level_at(nearest));
    }
    Simd::store_bytes(bytes + first * Simd::width, together);
  }
  std::memcpy(index, bytes, vectors * Simd::width);
  sum += multiplier * Simd::reduce_add(levels);
  return multiplier;
}

template <int group>
inline void quantize_rows(const hfca::QuantizeInt4& q, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const float* weight = q.weight + row * q.columns;
    Simd::Float magnitude = Simd::zero();
    for (int64_t j = 0; j < q.columns; j += Simd::width) magnitude = Simd::highest(magnitude, Simd::abs(Simd::load(weight + j)));
    const float scale = Simd::reduce_highest(magnitude) / 127.0f;
    const Simd::Float inverse = Simd::set1(scale > 0.0f ? 1.0f / scale : 1.0f);
    float sum = 0.0f;
    for (int64_t j = 0; j < q.columns; j += group)
      q.multiplier[(row * q.columns + j) / group] =
          static_cast<int8_t>(quantize_group<group / Simd::width>(weight + j, inverse, q.index + row * q.columns + j, sum));
    q.scale[row] = scale;
    q.sum[row] = sum;
  }
}

inline void quantize_int4(const hfca::QuantizeInt4& q, int64_t begin, int64_t end) {
  if (q.group == 32) return quantize_rows<32>(q, begin, end);
  if (q.group == 64) return quantize_rows<64>(q, begin, end);
  return quantize_rows<128>(q, begin, end);
}

}  // namespace HFCA_TIER
