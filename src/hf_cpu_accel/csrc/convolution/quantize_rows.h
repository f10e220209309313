// The kernels of quantize.h.
#pragma once
#include "../gemm/dot_int8.h"
#include "quantize.h"

namespace HFCA_TIER {

// f(values, where the first of them is among the pixels' own): 4 vectors of values side by side at a time.
template <class F>
inline void each_four_vectors(const hfca::Matrix& pixels, int64_t channels, int64_t begin, int64_t end, const F& f) {
  const auto each = [&](const auto* data) HFCA_INLINE {
    for (int64_t pixel = begin; pixel < end; ++pixel)
      for (int64_t c = 0; c < channels; c += 4 * Simd::width) {
        Simd::Float values[4];
        unroll<0, 4>([&](auto v) HFCA_INLINE { values[v] = load_as_float(data + pixels.offset(pixel) + c + v * Simd::width); });
        f(values, (pixel - begin) * channels + c);
      }
  };
  pixels.bf16 ? each(static_cast<const uint16_t*>(pixels.data)) : each(static_cast<const float*>(pixels.data));
}

inline void image_range(const hfca::Matrix& pixels, int64_t channels, int64_t begin, int64_t end, float* low_high) {
  Range range[4];
  each_four_vectors(pixels, channels, begin, end, [&](const Simd::Float(&values)[4], int64_t) HFCA_INLINE {
    unroll<0, 4>([&](auto v) HFCA_INLINE { range[v].add(values[v]); });
  });
  low_high[0] = low_high[1] = 0.0f;
  for (const Range& part : range) {
    const float low = part.least(), high = part.largest();
    if (!(low >= low_high[0])) low_high[0] = low;
    if (!(high <= low_high[1])) low_high[1] = high;
    if (low != low || high != high) break;  // NaN stays
  }
}

inline void quantize_image(const hfca::Matrix& pixels, int64_t channels, int64_t begin, int64_t end, const hfca::ByteSteps& with,
                           uint8_t* to) {
  each_four_vectors(pixels, channels, begin, end,
                    [&](const Simd::Float(&values)[4], int64_t at) HFCA_INLINE { store_as_bytes<false>(to + at, values, with); });
}

constexpr hfca::QuantizeImageKernels quantize_image_kernels() {
  return {&image_range, [](float low, float high) { return byte_steps(low, high, DotInt8::steps); },
          [](float low, float high) { return known_byte_steps(low, high, DotInt8::steps + 2); }, &quantize_image};
}

}  // namespace HFCA_TIER
