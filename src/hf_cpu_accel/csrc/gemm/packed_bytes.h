// Bytes of packed input.
#pragma once
#include <cstdint>
#include <cstring>

#include "../simd/simd.h"
#include "../simd/unroll.h"

namespace HFCA_TIER {

constexpr int packed_words = 16;  // of a row, side by side

// ARM's products of bytes (sdot) want a sign on both sides: packed bytes are by so much less than what they stand for, and so is the zero
// point that their rows are finished with.
#if defined(HFCA_SIMD_NEON)
constexpr int packed_less = 128;
#else
constexpr int packed_less = 0;
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
  if constexpr (packed_less != 0)
    for (int w = 0; w < packed_words; ++w) to[w] ^= 0x80808080u;
}

}  // namespace HFCA_TIER
