// Packs integer weights in one pass: a row is rotated, quantized, and put into its panel while it is in the cache.
#pragma once
#include <cstring>

#include "../gemm/pack.h"
#include "int4_search.h"
#include "rotated.h"

namespace HFCA_TIER {

// x[0, k) times H / 16 (rotation.py), behind it zeros up to `padded`, a multiple of the vectors' width; its largest magnitude.
template <class T>
inline float rotate_row(const T* x, int64_t k, int64_t padded, float* to) {
  constexpr float whole = 1.0f / 16.0f, rest = 1.0f / rotation_scale;
  Simd::Float largest = Simd::zero();
  int64_t j = 0;
  for (; j + rotated_features <= k; j += rotated_features) {
    Simd::Float block[rotated_vectors];
    unroll<0, rotated_vectors>([&](auto i) HFCA_INLINE { block[i] = load_as_float(x + j + i * Simd::width); });
    rotate_block(block);
    unroll<0, rotated_vectors>([&](auto i) HFCA_INLINE {
      const Simd::Float value = Simd::mul(block[i], Simd::set1(whole));
      Simd::store(to + j + i * Simd::width, value);
      largest = Simd::highest(largest, Simd::abs(value));
    });
  }
  for (; j < padded; j += Simd::width) {
    const Simd::Float value = Simd::mul(load_padded(x, j, k), Simd::set1(rest));
    Simd::store(to + j, value);
    largest = Simd::highest(largest, Simd::abs(value));
  }
  return Simd::reduce_highest(largest);
}

// values[0, padded), a multiple of 64, as bytes of int8 with `step`; returns the sum of the integers.
inline float quantize_row(const float* values, int64_t padded, float step, uint8_t* bytes) {
  const Simd::Float divisor = Simd::set1(step > 0.0f ? step : 1.0f), bound = Simd::set1(127.0f), zero = Simd::set1(128.0f);
  Simd::Float sum = Simd::zero();  // exact: integers below 2^24
  for (int64_t j = 0; j < padded; j += 4 * Simd::width) {
    Simd::Float together[4];
    unroll<0, 4>([&](auto v) HFCA_INLINE {
      const Simd::Float value = Simd::round(Simd::div(Simd::load(values + j + v * Simd::width), divisor));
      const Simd::Float integer = Simd::min(bound, Simd::max(Simd::sub(Simd::zero(), bound), value));
      sum = Simd::add(sum, integer);
      together[v] = Simd::add(integer, zero);
    });
    Simd::store_bytes(bytes + j, together);
  }
  return Simd::reduce_add(sum);
}

inline uint32_t word_at(const uint8_t* bytes) {
  uint32_t word;
  std::memcpy(&word, bytes, sizeof(word));
  return word;
}

// One row of a panel; `to` is the panel, and `lane` the row's place in it.
template <class T>
inline void pack_rotated_row(const hfca::PackRotated& p, const T* x, int64_t k, const hfca::RowScratch& scratch, uint8_t* to, int lane,
                             float& scale, float& sum) {
  const int64_t features = p.features();
  const float largest = rotate_row(x, k, (features + 63) / 64 * 64, scratch.values);
  if (p.group == 0) {
    scale = largest / 127.0f;
    sum = quantize_row(scratch.values, (features + 63) / 64 * 64, scale, scratch.bytes);
    for (int64_t w = 0; w < features / 4; ++w) {
      const uint32_t word = word_at(scratch.bytes + 4 * w) ^ 0x80808080u;  // counted from -128 so far
      std::memcpy(to + 4 * (w * hfca::panel_rows + lane), &word, sizeof(word));
    }
    return;
  }
  quantize_int4({scratch.values, features, p.group, scratch.bytes, scratch.multiplier, &scale, &sum}, 0, 1);
  for (int64_t g = 0; g < features / p.group; ++g, to += hfca::panel_rows + 16 * p.group) {
    to[lane] = static_cast<uint8_t>(scratch.multiplier[g]);
    const uint8_t* bytes = scratch.bytes + g * p.group;
    for (int64_t pair = 0; pair < p.group / 8; ++pair) {
      const uint32_t halves = word_at(bytes + 8 * pair) | word_at(bytes + 8 * pair + 4) << 4;
      std::memcpy(to + hfca::panel_rows * (1 + 4 * pair) + 4 * lane, &halves, sizeof(halves));
    }
  }
}

template <class T>
inline void pack_rotated_panels(const hfca::PackRotated& p, int64_t begin, int64_t end, const hfca::RowScratch& scratch) {
  for (int64_t panel = begin; panel < end; ++panel)
    for (int lane = 0; lane < hfca::panel_rows; ++lane) {
      const int64_t row = panel * hfca::panel_rows + lane;
      const bool there = row < p.rows;  // else a row of zeros
      float scale, sum;
      pack_rotated_row(p, static_cast<const T*>(p.weight) + (there ? row * p.columns : 0), there ? p.columns : 0, scratch,
                       p.data + panel * p.panel_bytes(), lane, scale, sum);
      if (there) p.scale[row] = scale, p.sum[row] = sum;
    }
}

inline void pack_rotated(const hfca::PackRotated& p, int64_t begin, int64_t end, const hfca::RowScratch& scratch) {
  if (p.is_bf16) return pack_rotated_panels<uint16_t>(p, begin, end, scratch);
  return pack_rotated_panels<float>(p, begin, end, scratch);
}

}  // namespace HFCA_TIER
