// Attention's arithmetic in float32 for few rows, straight from the caller's keys and values: packing them pays off only if many rows share it.
// This is the case of decoding and pooling. Each key and value is loaded once for up to row_group rows, and the time is that of
// reading them from memory. A row's result does not depend on the others: up to unpacked_rows queries are computed like one.
#pragma once
#include "arithmetic_f32.h"

namespace HFCA_TIER {

constexpr int64_t unpacked_rows = 16;  // up to so many rows of a task, and all heads of so many queries, are taken without packing
constexpr int row_group = 4;  // rows that share the loads
constexpr int row_vectors = Simd::registers == 32 ? 4 : 2;  // of each row in registers
// Of sums of so many rows.
template <int rows>
constexpr int sum_vectors = Simd::registers == 32 || rows <= 3 ? 4 : 2;

// The sum of the lanes of each vector.
inline Float lane_sums(Float (&x)[Simd::width]) {
#if defined(HFCA_SIMD_AVX512)
  // Halves, then quarters, pairs and single lanes of two vectors are added and share one. x is taken in the order in which this brings
  // the sums to their lanes.
  constexpr auto order = [](int i) { return i % 4 * 4 + i / 4; };
  Float half[8], quarter[4], pair[2];
  unroll<0, 8>([&](auto i) HFCA_INLINE {
    const Float a = x[order(2 * i)], b = x[order(2 * i + 1)];
    half[i] = Simd::add(_mm512_mask_blend_ps(0xFF00, a, b), _mm512_shuffle_f32x4(a, b, 0x4E));
  });
  unroll<0, 4>([&](auto i) HFCA_INLINE {
    const Float a = half[2 * i], b = half[2 * i + 1];
    quarter[i] = Simd::add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
  });
  unroll<0, 2>([&](auto i) HFCA_INLINE {
    const __m512d a = _mm512_castps_pd(quarter[2 * i]), b = _mm512_castps_pd(quarter[2 * i + 1]);
    pair[i] = Simd::add(_mm512_castpd_ps(_mm512_mask_blend_pd(0xAA, a, b)), _mm512_castpd_ps(_mm512_shuffle_pd(a, b, 0x55)));
  });
  return Simd::add(_mm512_shuffle_ps(pair[0], pair[1], 0x88), _mm512_shuffle_ps(pair[0], pair[1], 0xDD));
#else
  Simd::transpose(x);
  for (int i = 1; i < Simd::width; ++i) x[0] = Simd::add(x[0], x[i]);
  return x[0];
#endif
}

// Scores of `width` keys, of which `keys` exist: dot[row][key] (+)= the products of row_vectors or 1 vector of features from `feature` on.
template <hfca::HeadType type, int rows, int vectors>
inline void multiply_keys(const void* keys, const int64_t* at, int64_t feature, int n, const float* queries,
                          Float (&dot)[rows][Simd::width]) {
  Float query[rows][vectors];
  unroll<0, rows>([&](auto i) HFCA_INLINE {
    unroll<0, vectors>([&](auto v) HFCA_INLINE {
      const int64_t d = feature + v * Simd::width;
      query[i][v] = Simd::load(queries + (d / chunk * rows + i) * chunk + d % chunk);
    });
  });
  for (int k = 0; k < Simd::width; ++k) {
    Float key[vectors];
    unroll<0, vectors>(
        [&](auto v) HFCA_INLINE { key[v] = load_features<type>(keys, at[k] + feature + v * Simd::width, vectors == 1 ? n : Simd::width); });
    unroll<0, rows>([&](auto i) HFCA_INLINE {
      Float sum = feature == 0 ? Simd::mul(query[i][0], key[0]) : Simd::fma(query[i][0], key[0], dot[i][k]);
      unroll<1, vectors>([&](auto v) HFCA_INLINE { sum = Simd::fma(query[i][v], key[v], sum); });
      dot[i][k] = sum;
    });
  }
}

// Asks for the features of one position.
inline void ask_for(const hfca::Heads& x, int64_t at, int64_t features) {
  for (const char *p = x.at(at), *end = x.at(at + features); p < end; p += hfca::cache_line) __builtin_prefetch(p, 0, 2);
}

// scores[keys / 32][rows][32] = queries . keys [begin, begin + keys). Scores up to the next multiple of the vector width are overwritten.
template <hfca::HeadType type, int rows>
inline void score_keys(const hfca::Attention& a, const hfca::AttentionTask& task, const float* queries, int64_t begin, int64_t keys,
                       float* scores) {
  constexpr int64_t together = row_vectors * Simd::width;
  const int64_t origin = task.kv_head * a.key.head_stride, values = task.kv_head * a.value.head_stride;
  for (int64_t k = 0; k < keys; k += Simd::width) {
    int64_t at[Simd::width];
    for (int i = 0; i < Simd::width; ++i) {
      const int64_t key = begin + (k + i < keys ? k + i : keys - 1), batch = a.batch_of_key(key, task.batch);
      at[i] = origin + batch * a.key.batch_stride + key * a.key.position_stride;
      // Where weigh_values reads the values in stripes, no CPU foresees it.
      if (sum_vectors<rows> * Simd::width < a.value_dim)
        ask_for(a.value, values + batch * a.value.batch_stride + key * a.value.position_stride, a.value_dim);
    }
    Float dot[rows][Simd::width];
    int64_t d = 0;
    for (; d + together <= a.head_dim; d += together) multiply_keys<type, rows, row_vectors>(a.key.data, at, d, Simd::width, queries, dot);
    for (; d < a.head_dim; d += Simd::width) multiply_keys<type, rows, 1>(a.key.data, at, d, lanes(a.head_dim - d), queries, dot);
    float* out = scores + k / chunk * rows * chunk + k % chunk;
    if constexpr (type == hfca::HeadType::int8) {
      alignas(64) float scale[Simd::width];
      for (int i = 0; i < Simd::width; ++i) scale[i] = a.key.scale(at[i], a.head_dim);
      unroll<0, rows>([&](auto i) HFCA_INLINE { Simd::store(out + i * chunk, Simd::mul(Simd::load(scale), lane_sums(dot[i]))); });
    } else {
      unroll<0, rows>([&](auto i) HFCA_INLINE { Simd::store(out + i * chunk, lane_sums(dot[i])); });
    }
  }
}

// What the values of keys [begin, begin + keys) are to be multiplied by goes to their probabilities: there it is one factor per key.
template <int rows>
inline void scale_probabilities(const hfca::Attention& a, const hfca::AttentionTask& task, float* scores, int64_t begin, int64_t keys) {
  const int64_t origin = task.kv_head * a.value.head_stride;
  for (int64_t k = 0; k < keys; k += Simd::width) {
    alignas(64) float scale[Simd::width] = {};
    for (int i = 0; i < Simd::width && k + i < keys; ++i) {
      const int64_t key = begin + k + i;
      scale[i] =
          a.value.scale(origin + a.batch_of_key(key, task.batch) * a.value.batch_stride + key * a.value.position_stride, a.value_dim);
    }
    float* p = scores + k / chunk * rows * chunk + k % chunk;
    unroll<0, rows>([&](auto i) HFCA_INLINE { Simd::store(p + i * chunk, Simd::mul(Simd::load(scale), Simd::load(p + i * chunk))); });
  }
}

// sums[value_dim / 32][rows][32] (+)= scores @ values of keys [begin, begin + keys).
template <hfca::HeadType type, int rows>
inline void weigh_values(const hfca::Attention& a, const hfca::AttentionTask& task, const float* scores, int64_t begin, int64_t keys,
                         float* sums, bool accumulate) {
  constexpr int vectors = sum_vectors<rows>;
  const int64_t origin = task.kv_head * a.value.head_stride;
  for (int64_t d = 0; d < a.value_dim; d += vectors * Simd::width) {
    int n[vectors];
    float* sum[vectors];
    Float acc[rows][vectors];
    unroll<0, vectors>([&](auto v) HFCA_INLINE {
      const int64_t feature = d + v * Simd::width;
      n[v] = feature < a.value_dim ? lanes(a.value_dim - feature) : 0;
      sum[v] = sums + feature / chunk * rows * chunk + feature % chunk;
      unroll<0, rows>([&](auto i) HFCA_INLINE { acc[i][v] = accumulate && n[v] > 0 ? Simd::load(sum[v] + i * chunk) : Simd::zero(); });
    });
    for (int64_t k = 0; k < keys; ++k) {
      const float* p = scores + k / chunk * rows * chunk + k % chunk;
      const int64_t key = begin + k,
                    at = origin + a.batch_of_key(key, task.batch) * a.value.batch_stride + key * a.value.position_stride + d;
      Float probability[rows];
      unroll<0, rows>([&](auto i) HFCA_INLINE { probability[i] = Simd::set1(p[i * chunk]); });
      unroll<0, vectors>([&](auto v) HFCA_INLINE {
        const Float value = n[v] > 0 ? load_features<type>(a.value.data, at + v * Simd::width, n[v]) : Simd::zero();
        unroll<0, rows>([&](auto i) HFCA_INLINE { acc[i][v] = Simd::fma(probability[i], value, acc[i][v]); });
      });
    }
    unroll<0, vectors>([&](auto v) HFCA_INLINE {
      if (n[v] > 0) unroll<0, rows>([&](auto i) HFCA_INLINE { Simd::store(sum[v] + i * chunk, acc[i][v]); });
    });
  }
}

class FewRows : public QueriesF32 {
 public:
  static constexpr int rows_at_once = row_group;

  FewRows(const hfca::Attention& a, const hfca::AttentionTask& task, Carver& memory) : QueriesF32(a, task, memory) {}

  void take_keys(int64_t begin, int64_t) { begin_ = begin; }

  void score(int64_t row, int rows, int64_t keys, float* scores) const {
    with_head_type(a_.key, [&](auto type) {
      with_rows(rows, [&](auto n) {
        score_keys<decltype(type)::value, decltype(n)::number>(a_, task_, as_floats(queries_of(row).data), begin_, keys, scores);
      });
    });
  }

  void weigh(float* probabilities, int rows, int64_t keys, float* sums, bool accumulate) const {
    if (a_.value.type == hfca::HeadType::int8)
      with_rows(rows, [&](auto n) { scale_probabilities<decltype(n)::number>(a_, task_, probabilities, begin_, keys); });
    with_head_type(a_.value, [&](auto type) {
      with_rows(rows, [&](auto n) {
        weigh_values<decltype(type)::value, decltype(n)::number>(a_, task_, probabilities, begin_, keys, sums, accumulate);
      });
    });
  }

 private:
  template <class F>
  static void with_rows(int rows, const F& f) {
    static_assert(row_group == 4, "the cases below");
    switch (rows) {
      case 1: return f(Index<1>{});
      case 2: return f(Index<2>{});
      case 3: return f(Index<3>{});
      default: return f(Index<4>{});
    }
  }

  int64_t begin_ = 0;  // of the keys taken
};

}  // namespace HFCA_TIER
