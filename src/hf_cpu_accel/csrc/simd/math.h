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

// GELU (Hendrycks & Gimpel 2016, arXiv:1606.08415): x/2 (1 + erf(x / sqrt 2)) = (x + |x| E(|x|)) / 2 with E(a) = erf(a / sqrt 2).
// E(a) = a P(a^2) with P a minimax polynomial up to where E is 1 to float32's (coarse: to a hundred thousandth's) precision, fitted
// by Lawson's algorithm. Absolute error < 1e-6 max(1, |x|); coarse, for results that are rounded to bfloat16, < 6e-5. No exponential
// and no division: it is the epilogue of most FFNs.
template <bool coarse>
inline Float gelu(Float x) {
  const Float a = Simd::abs(x), one = Simd::set1(1.0f);
  Float p, near;
  if constexpr (coarse) {
    constexpr float coefficients[] = {
        8.394991646e-11f,  -8.498094672e-09f, 3.804522635e-07f,  -1.001244436e-05f, 1.742370659e-04f,
        -2.142792800e-03f, 1.939046942e-02f,  -1.323123425e-01f, 7.976110578e-01f,
    };
    near = Simd::min(Simd::set1(4.3f), a);
    const Float t = Simd::mul(near, near);
    p = Simd::set1(coefficients[0]);
    unroll<1, 9>([&](auto i) HFCA_INLINE { p = Simd::fma(p, t, Simd::set1(coefficients[i])); });
  } else {
    // In the variable 2 a^2 / 5.3^2 - 1, which keeps the coefficients of so high a degree small.
    constexpr float coefficients[] = {
        -1.316942243e-03f, 3.366450256e-03f,  -2.881204786e-03f, 3.856487958e-03f,  -1.097197602e-02f, 1.927166138e-02f,  -2.685033498e-02f,
        3.739259996e-02f,  -5.051713252e-02f, 6.424257670e-02f,  -7.916645135e-02f, 9.847341069e-02f,  -1.329569890e-01f, 2.666196851e-01f,
    };
    near = Simd::min(Simd::set1(5.30330086f), a);
    const Float t = Simd::fma(Simd::mul(near, near), Simd::set1(0.0711111111f), Simd::set1(-1.0f));
    p = Simd::set1(coefficients[0]);
    unroll<1, 14>([&](auto i) HFCA_INLINE { p = Simd::fma(p, t, Simd::set1(coefficients[i])); });
  }
  // Stretched by less than its error, so that E reaches 1: GELU of large negative numbers is 0 then and not a millionth of them.
  const Float e = Simd::min(one, Simd::mul(p, near));
  return Simd::mul(Simd::fma(a, e, x), Simd::set1(0.5f));
}

// 1 / (1 + e^-x)
inline Float sigmoid(Float x) {
  const Float one = Simd::set1(1.0f);
  return Simd::div(one, Simd::add(one, exp(Simd::sub(Simd::zero(), x))));
}

// log(1 + e^x) = max(x, 0) + log(1 + u) with u = e^-|x| <= 1, and log(1 + u) = 2 artanh(s) with s = u / (2 + u) <= 1/3, of whose series
// in s^2 the terms left out are below 2e-8 of it.
inline Float softplus(Float x) {
  const Float u = exp(Simd::sub(Simd::zero(), Simd::abs(x)));
  const Float s = Simd::div(u, Simd::add(Simd::set1(2.0f), u)), t = Simd::mul(s, s);
  Float p = Simd::set1(2.0f / 13);
  unroll<1, 7>([&](auto i) HFCA_INLINE { p = Simd::fma(p, t, Simd::set1(2.0f / (13 - 2 * i))); });
  return Simd::fma(p, s, Simd::max(x, Simd::zero()));
}

inline float softplus(float x) { return Simd::reduce_max(softplus(Simd::set1(x))); }

// sin(x)^2, absolute error < 5e-7 up to |x| = 1e5; beyond it is some number from 0 to 1, as good as any where x is known to few digits.
// Range reduction x = n pi + r with |r| <= pi / 2, pi in three parts of few bits (Cody & Waite), then r times a polynomial in r^2, fitted
// by Lawson's algorithm (error < 2e-11 before rounding).
inline Float squared_sine(Float x) {
  const Float n = Simd::round(Simd::mul(x, Simd::set1(0.318309886f))), bound = Simd::set1(1.6f);
  Float r = Simd::fnma(n, Simd::set1(3.140625f), x);
  r = Simd::fnma(n, Simd::set1(9.67502593994140625e-4f), r);
  r = Simd::fnma(n, Simd::set1(1.509957990978376432e-7f), r);
  r = Simd::max(Simd::sub(Simd::zero(), bound), Simd::min(bound, r));
  const Float t = Simd::mul(r, r);
  Float p = Simd::set1(-2.374517116e-08f);
  p = Simd::fma(p, t, Simd::set1(2.751573902e-06f));
  p = Simd::fma(p, t, Simd::set1(-1.984063274e-04f));
  p = Simd::fma(p, t, Simd::set1(8.333328180e-03f));
  p = Simd::fma(p, t, Simd::set1(-1.666666716e-01f));
  const Float sine = Simd::fma(Simd::mul(p, t), r, r);
  return Simd::mul(sine, sine);
}

// tanh(x), absolute error < 3e-7.
inline Float tanh(Float x) {
  const Float a = Simd::abs(x), one = Simd::set1(1.0f);
  const Float e = exp(Simd::mul(a, Simd::set1(-2.0f)));
  return Simd::copysign(Simd::div(Simd::sub(one, e), Simd::add(one, e)), x);
}

}  // namespace HFCA_TIER
