// Softmax over rows of scores in chunks of 32 keys, [keys / 32][rows][32], without the division by the sum.
#pragma once
#include "pack_heads.h"

namespace HFCA_TIER {

// e^x for x <= 0: 2^n 2^r with n = round(x log2 e) and a minimax polynomial of degree 5 for 2^r. Relative error < 3e-7 + |x| 6e-8.
// Fewer steps than exp of simd/math.h: softmax spends most of its time here. Below 2^-125 it is 0: CPUs take a hundred times as long
// for numbers that are not normal, and masks of -100 (Swin) would make half of them such.
inline Float exp_nonpositive(Float x) {
  const Float least = Simd::set1(-125.0f), t = Simd::max(least, Simd::mul(x, Simd::set1(1.44269504088896341f)));
  const Float n = Simd::round(t);
  const Float r = Simd::sub(t, n);
  Float p = Simd::set1(1.327647199e-3f);
  p = Simd::fma(p, r, Simd::set1(9.675541334e-3f));
  p = Simd::fma(p, r, Simd::set1(5.550713273e-2f));
  p = Simd::fma(p, r, Simd::set1(0.2402211972f));
  p = Simd::fma(p, r, Simd::set1(0.6931469671f));
  p = Simd::fma(p, r, Simd::set1(1.0f));
  return Simd::where_equal(t, least, Simd::zero(), Simd::scale_by_power_of_two(p, n));
}

// What to add to the scores of one row for keys [begin, begin + count), or null. Boolean and bfloat16 masks are spelt out in `buffer`.
inline const float* mask_row(const hfca::Attention& a, int64_t at, int64_t count, float* buffer) {
  using hfca::MaskKind;
  switch (a.mask_kind) {
    case MaskKind::none: return nullptr;
    case MaskKind::float32: return static_cast<const float*>(a.mask) + at;
    case MaskKind::bfloat16: {
      const uint16_t* mask = static_cast<const uint16_t*>(a.mask) + at;
      for (int64_t j = 0; j < count; j += Simd::width) Simd::store(buffer + j, Simd::load_bf16_n(mask + j, lanes(count - j)));
      return buffer;
    }
    case MaskKind::boolean: {
      const uint8_t* mask = static_cast<const uint8_t*>(a.mask) + at;
      for (int64_t j = 0; j < count; ++j) buffer[j] = mask[j] ? 0.0f : -__builtin_inff();
      return buffer;
    }
  }
  return nullptr;
}

// Adds `mask` (or null) to the first `visible` scores of a row and returns their maximum; -infinity if there are none. The row's
// chunks lie `distance` floats apart; what follows `visible` in the last vector becomes -infinity.
// A NaN score may be lost here, not in the sum below: its exponential is NaN.
inline float mask_and_maximum(float* scores, int64_t distance, int64_t visible, const float* mask) {
  const Float lowest = Simd::set1(-__builtin_inff());
  Float largest = lowest;
  int64_t j = 0;
  if (!mask)
    for (; j + chunk <= visible; j += chunk, scores += distance)
      unroll<0, chunk / Simd::width>([&](auto v) HFCA_INLINE { largest = Simd::max(largest, Simd::load(scores + v * Simd::width)); });
  for (; j < visible; j += chunk, scores += distance)
    for (int v = 0; v < chunk && j + v < visible; v += Simd::width) {
      const int n = lanes(visible - j - v);
      Float x = Simd::load(scores + v);
      if (mask) x = Simd::add(x, n == Simd::width ? Simd::load(mask + j + v) : Simd::load_n(mask + j + v, n));
      x = Simd::select_n(x, n, lowest);
      Simd::store(scores + v, x);
      largest = Simd::max(largest, x);
    }
  return Simd::reduce_max(largest);
}

// What `relative` (see attention.h) says for the `width` keys of which the first is `distance` positions before the query.
inline Float relative_bias(const hfca::Attention& a, int64_t head, int64_t distance) {
  const float* table = a.relative + head * a.relative_count;
  const int64_t last = a.relative_count - 1, at = last - distance;
  if (at >= 0 && at + Simd::width <= a.relative_count) return Simd::load(table + at);
  if (at + Simd::width <= 1) return Simd::set1(table[0]);
  alignas(64) float bias[Simd::width];
  for (int64_t i = 0; i < Simd::width; ++i) bias[i] = table[at + i < 0 ? 0 : at + i < last ? at + i : last];
  return Simd::load(bias);
}

// The decoders' variants of the first `visible` scores of a row, which come before its mask. Key j is `distance_to_first` - j positions
// before the query.
inline void vary_scores(const hfca::Attention& a, int64_t head, float* scores, int64_t distance, int64_t visible,
                        int64_t distance_to_first) {
  alignas(64) float count[Simd::width];
  for (int i = 0; i < Simd::width; ++i) count[i] = static_cast<float>(i);
  const Float slope = Simd::set1(a.alibi ? a.alibi[head] : 0.0f), cap = Simd::set1(a.softcap), ramp = Simd::load(count);
  for (int64_t j = 0; j < visible; j += Simd::width) {
    float* p = scores + j / chunk * distance + j % chunk;
    Float x = Simd::load(p);
    if (a.softcap > 0.0f) x = Simd::mul(cap, tanh(Simd::div(x, cap)));
    if (a.alibi) x = Simd::fnma(slope, Simd::sub(Simd::set1(static_cast<float>(distance_to_first - j)), ramp), x);
    if (a.relative) x = Simd::add(x, relative_bias(a, head, distance_to_first - j));
    Simd::store(p, x);
  }
}

// The first `hidden` scores of a row become -infinity.
inline void hide_scores(float* scores, int64_t distance, int64_t hidden) {
  const Float lowest = Simd::set1(-__builtin_inff());
  for (int64_t j = 0; j < hidden; j += Simd::width) {
    float* p = scores + j / chunk * distance + j % chunk;
    Simd::store(p, Simd::select_n(lowest, lanes(hidden - j), Simd::load(p)));
  }
}

// Turns the first `visible` scores of a row into exp(score - shift) and the rest up to `keys` into 0; returns their sum.
inline float exponentials(float* scores, int64_t distance, int64_t visible, int64_t keys, float shift) {
  const Float center = Simd::set1(shift);
  Float sum[2] = {Simd::zero(), Simd::zero()};
  const auto step = [&](float* p, int which) HFCA_INLINE {
    const Float x = exp_nonpositive(Simd::sub(Simd::load(p), center));
    Simd::store(p, x);
    sum[which] = Simd::add(sum[which], x);
  };
  int64_t j = 0;
  for (; j + chunk <= visible; j += chunk, scores += distance)
    unroll<0, chunk / Simd::width>([&](auto v) HFCA_INLINE { step(scores + v * Simd::width, v % 2); });
  for (; j < keys; j += chunk, scores += distance)
    for (int v = 0; v < chunk && j + v < keys; v += Simd::width) {
      if (j + v < visible) step(scores + v, 0);
      else Simd::store(scores + v, Simd::zero());
    }
  return Simd::reduce_add(Simd::add(sum[0], sum[1]));
}

inline float exp_nonpositive(float x) {
  alignas(64) float lane[Simd::width];
  Simd::store(lane, exp_nonpositive(Simd::set1(x)));
  return lane[0];
}

}  // namespace HFCA_TIER
