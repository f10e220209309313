// Elementary functions on vectors, accurate to a few float32 ulp unless noted.
#pragma once
#include "simd.h"

namespace HFCA_TIER {

using Float = Simd::Float;

// e^x. Range reduction x = n ln2 + r with |r| <= ln2 / 2, then a degree-6 polynomial (Cephes expf). Relative error < 2e-7.
inline Float exp(Float x) {
  x = Simd::min(Simd::set1(89.0f), Simd::max(Simd::set1(-105.0f), x));
  const Float n = Simd::round(Simd::mul(x, Simd::set1(1.44269504088896341f)));
  Float r = Simd::fnma(n, Simd::set1(0.693359375f), x);
  r = Simd::fnma(n, Simd::set1(-2.12194440e-4f), r);
  Float p = Simd::set1(1.9875691500e-4f);
  p = Simd::fma(p, r, Simd::set1(1.3981999507e-3f));
  p = Simd::fma(p, r, Simd::set1(8.3334519073e-3f));
  p = Simd::fma(p, r, Simd::set1(4.1665795894e-2f));
  p = Simd::fma(p, r, Simd::set1(1.6666665459e-1f));
  p = Simd::fma(p, r, Simd::set1(5.0000001201e-1f));
  p = Simd::add(Simd::fma(Simd::mul(p, r), r, r), Simd::set1(1.0f));
  return Simd::scale_by_power_of_two(p, n);
}

// erf(x), absolute error < 1.5e-7 (Abramowitz & Stegun 7.1.26).
inline Float erf(Float x) {
  const Float a = Simd::abs(x), one = Simd::set1(1.0f);
  const Float t = Simd::div(one, Simd::fma(Simd::set1(0.3275911f), a, one));
  Float p = Simd::set1(1.061405429f);
  p = Simd::fma(p, t, Simd::set1(-1.453152027f));
  p = Simd::fma(p, t, Simd::set1(1.421413741f));
  p = Simd::fma(p, t, Simd::set1(-0.284496736f));
  p = Simd::fma(p, t, Simd::set1(0.254829592f));
  const Float tail = Simd::mul(Simd::mul(p, t), exp(Simd::sub(Simd::zero(), Simd::mul(a, a))));
  return Simd::copysign(Simd::sub(one, tail), x);
}

// 1 / (1 + e^-x)
inline Float sigmoid(Float x) {
  const Float one = Simd::set1(1.0f);
  return Simd::div(one, Simd::add(one, exp(Simd::sub(Simd::zero(), x))));
}

// tanh(x), absolute error < 3e-7.
inline Float tanh(Float x) {
  const Float a = Simd::abs(x), one = Simd::set1(1.0f);
  const Float e = exp(Simd::mul(a, Simd::set1(-2.0f)));
  return Simd::copysign(Simd::div(Simd::sub(one, e), Simd::add(one, e)), x);
}

}  // namespace HFCA_TIER
