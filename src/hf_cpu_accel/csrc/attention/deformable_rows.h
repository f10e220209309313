// Query by query and head by head: first the pixels and their weights, then their sum, a few vectors of features at a time.
#pragma once
#include "../norm/norm_rows.h"
#include "deformable.h"

namespace HFCA_TIER {

inline int64_t pixel_below(float x) {
  const int64_t whole = static_cast<int64_t>(x);
  return static_cast<float>(whole) > x ? whole - 1 : whole;
}

// The pixels around the points of one head of a query that lie inside of their images; what lies outside is 0. Returns how many.
inline int64_t find_corners(const hfca::DeformableAttention& a, const char* value, const float* points, const float* weights,
                            hfca::Corner* corners) {
  const int64_t stride = a.value_strides[1] * static_cast<int64_t>(a.bf16 ? sizeof(uint16_t) : sizeof(float));
  int64_t count = 0;
  for (int64_t l = 0; l < a.level_count; ++l) {
    const hfca::ImageLevel& level = a.levels[l];
    const float width = static_cast<float>(level.width), height = static_cast<float>(level.height);
    for (int64_t p = 0; p < level.points; ++p, points += 2, ++weights) {
      const float x = points[0] * width - 0.5f, y = points[1] * height - 0.5f;
      if (!(x > -1.0f && y > -1.0f && x < width && y < height)) continue;
      const int64_t left = pixel_below(x), top = pixel_below(y);
      const float right_share = x - static_cast<float>(left), lower_share = y - static_cast<float>(top);
      for (int64_t i = 0; i < 4; ++i) {
        const int64_t column = left + i % 2, row = top + i / 2;
        if (column < 0 || row < 0 || column >= level.width || row >= level.height) continue;
        const float share = (i % 2 ? right_share : 1.0f - right_share) * (i / 2 ? lower_share : 1.0f - lower_share);
        corners[count++] = {value + (level.first + row * level.width + column) * stride, share * *weights};
      }
    }
  }
  return count;
}

template <bool bf16, int vectors>
inline void sum_corners(const hfca::Corner* corners, int64_t count, int64_t column, int last, void* out) {
  const auto lanes = [&](int v) HFCA_INLINE { return v == vectors - 1 ? last : Simd::width; };
  Float sum[vectors];
  unroll<0, vectors>([&](auto v) HFCA_INLINE { sum[v] = Simd::zero(); });
  for (int64_t i = 0; i < count; ++i) {
    const Float weight = Simd::set1(corners[i].weight);
    unroll<0, vectors>([&](auto v) HFCA_INLINE {
      sum[v] = Simd::fma(weight, load_columns<bf16>(corners[i].values, column + v * Simd::width, lanes(v)), sum[v]);
    });
  }
  unroll<0, vectors>([&](auto v) HFCA_INLINE { store_columns<bf16>(out, column + v * Simd::width, lanes(v), sum[v]); });
}

template <bool bf16>
inline void sum_features(const hfca::Corner* corners, int64_t count, int64_t features, void* out) {
  constexpr int most = 4;
  int64_t column = 0;
  for (; column + most * Simd::width <= features; column += most * Simd::width)
    sum_corners<bf16, most>(corners, count, column, Simd::width, out);
  for (; column < features; column += Simd::width) {
    const int64_t left = features - column;
    sum_corners<bf16, 1>(corners, count, column, left < Simd::width ? static_cast<int>(left) : Simd::width, out);
  }
}

inline void deformable_attention(const hfca::DeformableAttention& a, int64_t begin, int64_t end, hfca::Corner* corners) {
  const int64_t element = a.bf16 ? sizeof(uint16_t) : sizeof(float);
  for (int64_t query = begin; query < end; ++query) {
    const char* const image = static_cast<const char*>(a.value) + query / a.queries * a.value_strides[0] * element;
    for (int64_t head = 0; head < a.heads; ++head) {
      const int64_t row = query * a.heads + head, first = row * a.points_of_head;
      const int64_t count = find_corners(a, image + head * a.value_strides[2] * element, a.points + 2 * first, a.weights + first, corners);
      void* const out = static_cast<char*>(a.output) + row * a.features * element;
      a.bf16 ? sum_features<true>(corners, count, a.features, out) : sum_features<false>(corners, count, a.features, out);
    }
  }
}

}  // namespace HFCA_TIER
