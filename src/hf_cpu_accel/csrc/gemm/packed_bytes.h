// Bytes of packed input.
#pragma once
#include <cstdint>
#include <cstring>

#include "../simd/simd.h"
#include "../simd/unroll.h"

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define HFCA_VNNI 1
#elif defined(HFCA_SIMD_AVX2) || defined(HFCA_SIMD_AVX512)
#define HFCA_WITHOUT_VNNI 1
#endif

namespace HFCA_TIER {

constexpr int packed_words = 16;  // of a row, side by side

// Where both sides of a product of bytes have a sign, packed bytes are by so much less than what they stand for, and so is the zero point that
// their rows are finished with: ARM's products (sdot) want it, and without VNNI the magnitudes of 8 bits would overflow (signs.h, which
// subtracts it).
#if defined(HFCA_SIMD_NEON) || HFCA_WITHOUT_VNNI
constexpr int packed_less = 128;
#else
constexpr int packed_less = 0;
#endif
#if defined(HFCA_SIMD_NEON)
constexpr bool packs_signed = true;  // bytes have their sign as they are packed
#else
constexpr bool packs_signed = false;
#endif

inline float packed_zero(float zero) { return packed_less ? zero - static_cast<float>(packed_less) : zero; }

// values[0, 4 * width), rounded, as packed bytes.
HFCA_INLINE inline void store_packed_bytes(uint8_t* to, const Simd::Float (&values)[4]) {
#if defined(HFCA_SIMD_NEON)
  Simd::store_signed_bytes(to, values);
#else
  Simd::store_bytes(to, values);
#endif
}

// A line of bytes as packed ones.
inline void pack_line(uint32_t* to, const void* bytes) {
  std::memcpy(to, bytes, packed_words * sizeof(uint32_t));
  if constexpr (packs_signed)
    for (int w = 0; w < packed_words; ++w) to[w] ^= 0x80808080u;
}

}  // namespace HFCA_TIER
