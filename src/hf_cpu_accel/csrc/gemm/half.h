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
  const __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i magnitude = _mm256_slli_epi32(_mm256_and_si256(bits, _mm256_set1_epi32(0x7FFF)), 13);
  const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(bits, _mm256_set1_epi32(0x8000)), 16);
  const __m256 value = _mm256_mul_ps(_mm256_castsi256_ps(magnitude), _mm256_set1_ps(0x1p112f));  // the exponent's bias: 127 - 15
  return _mm256_or_ps(value, _mm256_castsi256_ps(sign));
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
