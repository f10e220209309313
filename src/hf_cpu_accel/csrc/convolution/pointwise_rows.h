// The kernels of pointwise.h.
#pragma once
#include "grouped_rows.h"
#include "pointwise.h"

namespace HFCA_TIER {

inline void combine_pixels(const hfca::CombinedPixels& all) {
  hfca::CombinedPixels p = all;
  if (!p.other || p.other_apart != 0) p.channels *= p.pixels, p.pixels = 1;  // one row of numbers
  const hfca::Matrix input{const_cast<void*>(p.input), p.channels, p.input_bf16}, other{const_cast<void*>(p.other), 0, p.other_bf16},
      output{p.output, p.channels, p.output_bf16};
  with_activation(p.activation, [&](auto act) HFCA_INLINE {
    for (int64_t i = 0; i < p.pixels; ++i)
      for (int64_t c = 0; c < p.channels; c += Simd::width) {
        const int n = lanes_left(c, p.channels);
        Simd::Float x = load_any_n(input, i, c, n);
        if (p.other) {
          const Simd::Float y = load_any_n(other, 0, c, n);
          x = p.product ? Simd::mul(x, y) : Simd::add(x, y);
        }
        store_lanes<false>(output, i * p.channels + c, act(x), n);
      }
  });
}

inline void affine_pixels(const hfca::AffinePixels& p) {
  const hfca::Matrix input{const_cast<void*>(p.input), p.apart, p.input_bf16}, output{p.output, p.channels, p.output_bf16};
  with_activation(p.activation, [&](auto act) HFCA_INLINE {
    for (int64_t i = 0; i < p.pixels; ++i)
      for (int64_t c = 0; c < p.channels; c += Simd::width) {
        const int n = lanes_left(c, p.channels);
        const Simd::Float x = load_any_n(input, i, c, n);
        const Simd::Float y = Simd::fma(x, Simd::load_n(p.gain + c, n), Simd::load_n(p.shift + c, n));
        store_lanes<false>(output, i * p.channels + c, act(y), n);
      }
  });
}

// Sums of some pixels at a time: of thousands, one after another, the last ones would be rounded to the size of all before.
inline void add_pixels(const void* pixels, bool bf16, int64_t count, int64_t apart, int64_t channels, float* sums) {
  constexpr int64_t some = 128;
  const auto add = [&](const auto* x) HFCA_INLINE {
    for (int64_t c = 0; c < channels; c += Simd::width) {
      const int n = lanes_left(c, channels);
      for (int64_t first = 0; first < count; first += some) {
        Simd::Float four[4] = {Simd::zero(), Simd::zero(), Simd::zero(), Simd::zero()};
        const int64_t end = first + some < count ? first + some : count;
        int64_t i = first;
        for (; i + 4 <= end; i += 4)
          unroll<0, 4>([&](auto j) HFCA_INLINE { four[j] = Simd::add(four[j], load_as_float_n(x + (i + j) * apart + c, n)); });
        for (; i < end; ++i) four[0] = Simd::add(four[0], load_as_float_n(x + i * apart + c, n));
        const Simd::Float sum = Simd::add(Simd::add(four[0], four[1]), Simd::add(four[2], four[3]));
        Simd::store_n(sums + c, Simd::add(Simd::load_n(sums + c, n), sum), n);
      }
    }
  };
  bf16 ? add(static_cast<const uint16_t*>(pixels)) : add(static_cast<const float*>(pixels));
}

inline void scale_channels(const float* sums, float factor, int64_t channels, void* to, bool to_bf16) {
  const hfca::Matrix output{to, channels, to_bf16};
  for (int64_t c = 0; c < channels; c += Simd::width) {
    const int n = lanes_left(c, channels);
    store_lanes<false>(output, c, Simd::mul(Simd::load_n(sums + c, n), Simd::set1(factor)), n);
  }
}

constexpr hfca::PointwiseKernels pointwise_kernels() {
  return {&grouped_row, &combine_pixels, &affine_pixels, &add_pixels, &scale_channels};
}

}  // namespace HFCA_TIER
