// Numbers of 16 bits that scales may come in.
#pragma once
#include <cstdint>
#include <cstring>

#include "../simd/simd.h"

namespace HFCA_TIER {

// IEEE half precision; infinities and NaN are not among scales.
inline Simd::Float load_half(const uint16_t* p) {
#if defined(HFCA_SIMD_AVX512)
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(HFCA_SIMD_AVX2)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(HFCA_SIMD_NEON)
  const float16x8_t halves = vreinterpretq_f16_u16(vld1q_u16(p));
  return {vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)};
#else
  Simd::Float r;
  for (int i = 0; i < Simd::width; ++i) {
    const uint32_t magnitude = static_cast<uint32_t>(p[i] & 0x7FFF) << 13;
    float value;
    std::memcpy(&value, &magnitude, sizeof(value));
    r[i] = value * (p[i] & 0x8000 ? -0x1p112f : 0x1p112f);
  }
  return r;
#endif
}

}  // namespace HFCA_TIER
