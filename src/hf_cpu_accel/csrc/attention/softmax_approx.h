// The exponentials of softmax for arithmetics that round probabilities anyway.
#pragma once
#include "softmax.h"

namespace HFCA_TIER {

// 2^t, relative error < 8e-5, for probabilities that are rounded to 13 bits or fewer. 0 where it is not normal, as exp_nonpositive.
inline Float approx_power_of_two(Float t) {
  const Float least = Simd::set1(-125.0f);
  t = Simd::max(least, t);  // infinity has no fraction
  const Float r = Simd::fraction(t);
  Float p = Simd::set1(7.802452170e-2f);
  p = Simd::fma(p, r, Simd::set1(2.260671568e-1f));
  p = Simd::fma(p, r, Simd::set1(6.958335400e-1f));
  p = Simd::fma(p, r, Simd::set1(9.999252186e-1f));
  return Simd::where_equal(t, least, Simd::zero(), Simd::scale_by_power_of_two(p, Simd::sub(t, r)));
}

// Sums 2^exponent(score) of a row, 0 from `visible` on; see approx_exponentials.
template <class Exponent, class Store>
inline float approx_powers(const float* scores, int64_t distance, int64_t visible, int64_t keys, const Exponent& exponent,
                           const Store& store) {
  constexpr int halves = chunk / Simd::width / 2;
  Float sum[2] = {Simd::zero(), Simd::zero()};
  for (int64_t k = 0; k < keys; k += chunk, scores += distance) {
    const int64_t left = visible - k;
    const auto step = [&](auto v, bool full) HFCA_INLINE {
      constexpr int at = decltype(v)::number * Simd::width;
      const Float x = approx_power_of_two(exponent(Simd::load(scores + at)));
      return full || left - at >= Simd::width ? x : left > at ? Simd::select_n(x, static_cast<int>(left - at), Simd::zero()) : Simd::zero();
    };
    const auto all = [&](bool full) HFCA_INLINE {
      unroll<0, halves>([&](auto v) HFCA_INLINE {
        const Float low = step(v, full), high = step(Index<decltype(v)::number + halves>{}, full);
        store(k, v, low, high);
        sum[0] = Simd::add(sum[0], low);
        sum[1] = Simd::add(sum[1], high);
      });
    };
    left >= chunk ? all(true) : all(false);
  }
  return Simd::reduce_add(Simd::add(sum[0], sum[1]));
}

// 2^power exp(score - shift) of a row, 0 from `visible` on, roughly; returns their sum. store(key, v, low, high) takes vector v of the lower
// and of the higher half of a chunk of keys.
template <class Store>
inline float approx_exponentials(const float* scores, int64_t distance, int64_t visible, int64_t keys, float shift, float power,
                                 const Store& store) {
  constexpr float log2_e = 1.44269504088896341f, far = 1e4f;
  const Float factor = Simd::set1(log2_e);
  if (shift > -far && shift < far) {
    const Float offset = Simd::set1(power - shift * log2_e);
    return approx_powers(scores, distance, visible, keys, [&](Float score) HFCA_INLINE { return Simd::fma(score, factor, offset); }, store);
  }
  // All scores of the row are masked, by the lowest float or -1e9: of such numbers, the difference is all that counts.
  const Float offset = Simd::set1(power), center = Simd::set1(shift);
  return approx_powers(
      scores, distance, visible, keys, [&](Float score) HFCA_INLINE { return Simd::fma(Simd::sub(score, center), factor, offset); }, store);
}

}  // namespace HFCA_TIER
