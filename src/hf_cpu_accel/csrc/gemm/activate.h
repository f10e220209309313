// What epilogues do to vectors of sums: activations, and lanes of matrices.
#pragma once
#include "../simd/math.h"
#include "pack.h"

namespace HFCA_TIER {

// coarse: for results that are rounded to bfloat16.
template <hfca::Activation act, bool coarse>
inline Simd::Float activate(Simd::Float x) {
  using hfca::Activation;
  if constexpr (act == Activation::gelu) {
    return gelu<coarse>(x);
  } else if constexpr (act == Activation::gelu_tanh) {  // x sigmoid(2 u), u = sqrt(2/pi) (x + 0.044715 x^3)
    const Simd::Float u = Simd::mul(x, Simd::fma(Simd::mul(x, x), Simd::set1(0.0713548162726f), Simd::set1(1.5957691216057f)));
    return Simd::mul(x, sigmoid(u));
  } else if constexpr (act == Activation::relu) {
    return Simd::max(Simd::zero(), x);
  } else if constexpr (act == Activation::silu) {
    return Simd::mul(x, sigmoid(x));
  } else if constexpr (act == Activation::quick_gelu) {
    return Simd::mul(x, sigmoid(Simd::mul(x, Simd::set1(1.702f))));
  } else if constexpr (act == Activation::tanh) {
    return tanh(x);
  } else if constexpr (act == Activation::relu2) {
    const Simd::Float positive = Simd::max(Simd::zero(), x);
    return Simd::mul(positive, positive);
  } else if constexpr (act == Activation::relu6) {
    return Simd::min(Simd::set1(6.0f), Simd::max(Simd::zero(), x));
  } else if constexpr (act == Activation::hardswish) {  // x min(max(x + 3, 0), 6) / 6
    const Simd::Float gate = Simd::min(Simd::set1(6.0f), Simd::max(Simd::zero(), Simd::add(x, Simd::set1(3.0f))));
    return Simd::mul(Simd::mul(x, gate), Simd::set1(1.0f / 6.0f));
  } else if constexpr (act == Activation::leaky_relu || act == Activation::leaky_relu_tenth) {
    return Simd::max(Simd::mul(x, Simd::set1(act == Activation::leaky_relu ? 0.01f : 0.1f)), x);
  } else if constexpr (act == Activation::sigmoid) {
    return sigmoid(x);
  } else if constexpr (act == Activation::hardsigmoid) {  // min(max(x + 3, 0), 6) / 6
    const Simd::Float above = Simd::max(Simd::zero(), Simd::add(x, Simd::set1(3.0f)));
    return Simd::mul(Simd::min(Simd::set1(6.0f), above), Simd::set1(1.0f / 6.0f));
  } else {
    return x;
  }
}

// n lanes of a matrix, `at` elements from its start; all of them if full.
template <bool full>
inline Simd::Float load_lanes(const hfca::Matrix& x, int64_t at, int n) {
  const auto* halves = static_cast<const uint16_t*>(x.data) + at;
  const auto* floats = static_cast<const float*>(x.data) + at;
  if constexpr (full) return x.bf16 ? Simd::load_bf16(halves) : Simd::load(floats);
  else return x.bf16 ? Simd::load_bf16_n(halves, n) : Simd::load_n(floats, n);
}

template <bool full>
inline void store_lanes(const hfca::Matrix& x, int64_t at, Simd::Float value, int n) {
  auto* halves = static_cast<uint16_t*>(x.data) + at;
  auto* floats = static_cast<float*>(x.data) + at;
  if constexpr (full) x.bf16 ? Simd::store_bf16(halves, value) : Simd::store(floats, value);
  else x.bf16 ? Simd::store_bf16_n(halves, value, n) : Simd::store_n(floats, value, n);
}

}  // namespace HFCA_TIER
