// The two multiplications for a single row, straight from the caller's keys and values: packing them pays off only if several rows
// share it. This is the case of one query per key head, decoding and pooling.
#pragma once
#include "pack_heads.h"

namespace HFCA_TIER {

constexpr int64_t unpacked_rows = 2;  // up to so many rows of a task are taken one by one

// scores[keys] = query . key for keys [begin, begin + keys). Scores up to the next multiple of the vector width are overwritten.
inline void score_keys(const hfca::Attention& a, const hfca::AttentionTask& task, const float* query, int64_t begin, int64_t keys, float* scores) {
  const int64_t origin = task.batch * a.key.batch_stride + task.kv_head * a.key.head_stride + begin * a.key.position_stride;
  for (int64_t k = 0; k < keys; k += Simd::width) {
    Float dot[Simd::width];
    for (int i = 0; i < Simd::width; ++i) {
      const int64_t key = origin + (k + i < keys ? k + i : keys - 1) * a.key.position_stride;
      dot[i] = Simd::zero();
      for (int64_t d = 0; d < a.head_dim; d += Simd::width)
        dot[i] = Simd::fma(Simd::load(query + d), load_features(a.key, key + d, lanes(a.head_dim - d)), dot[i]);
    }
    Simd::transpose(dot);
    for (int i = 1; i < Simd::width; ++i) dot[0] = Simd::add(dot[0], dot[i]);
    Simd::store(scores + k, dot[0]);
  }
}

// sums[value_dim] (+)= probabilities @ values of keys [begin, begin + keys).
inline void weigh_values(const hfca::Attention& a, const hfca::AttentionTask& task, const float* probabilities, int64_t begin, int64_t keys,
                         float* sums, bool accumulate) {
  constexpr int vectors = 4;
  const int64_t origin = task.batch * a.value.batch_stride + task.kv_head * a.value.head_stride + begin * a.value.position_stride;
  for (int64_t d = 0; d < a.value_dim; d += vectors * Simd::width) {
    Float acc[vectors];
    int n[vectors];
    unroll<0, vectors>([&](auto v) HFCA_INLINE {
      const int64_t left = a.value_dim - d - v * Simd::width;
      n[v] = left > 0 ? lanes(left) : 0;
      acc[v] = accumulate ? Simd::load_n(sums + d + v * Simd::width, n[v]) : Simd::zero();
    });
    for (int64_t k = 0; k < keys; ++k) {
      const Float p = Simd::set1(probabilities[k]);
      const int64_t at = origin + k * a.value.position_stride + d;
      unroll<0, vectors>([&](auto v) HFCA_INLINE {
        if (n[v] > 0) acc[v] = Simd::fma(p, load_features(a.value, at + v * Simd::width, n[v]), acc[v]);
      });
    }
    unroll<0, vectors>([&](auto v) HFCA_INLINE { Simd::store_n(sums + d + v * Simd::width, acc[v], n[v]); });
  }
}

}  // namespace HFCA_TIER
