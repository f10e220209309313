// Elementary functions on vectors, accurate to a few float32 ulp unless noted.
#pragma once
#include "simd.h"
#include "unroll.h"

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

// erf(x), absolute error < 9e-7: x P(x^2) with P a minimax polynomial of degree 13 on |x| <= 3.75, where erf is 1 to 1.2e-7 (fitted by
// Lawson's algorithm in the variable 2 x^2 / 3.75^2 - 1, which keeps the coefficients small). No exponential and no division: it is
// the epilogue of every GELU.
inline Float erf(Float x) {
  constexpr float coefficients[] = {
      -1.862436649e-03f, 4.760877229e-03f, -4.074636847e-03f, 5.453894846e-03f, -1.551670954e-02f,
      2.725423127e-02f, -3.797208890e-02f, 5.288109556e-02f, -7.144197822e-02f, 9.085267782e-02f,
      -1.119582132e-01f, 1.392623633e-01f, -1.880294830e-01f, 3.770569861e-01f,
  };
  x = Simd::min(Simd::set1(3.75f), Simd::max(Simd::set1(-3.75f), x));
  const Float t = Simd::fma(Simd::mul(x, x), Simd::set1(0.142222222f), Simd::set1(-1.0f));
  Float p = Simd::set1(coefficients[0]);
  unroll<1, 14>([&](auto i) HFCA_INLINE { p = Simd::fma(p, t, Simd::set1(coefficients[i])); });
  // Stretched by less than its error, so that it reaches 1: GELU of large negative numbers is 0 then and not a millionth of them.
  return Simd::min(Simd::set1(1.0f), Simd::max(Simd::set1(-1.0f), Simd::mul(Simd::mul(p, Simd::set1(1.0000005f)), x)));
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
