// Heads of one token: see heads.h. A head is at most a few hundred features and stays in L1 between its passes.
#pragma once
#include "../gemm/pack.h"
#include "../norm/norm_rows.h"
#include "heads.h"

namespace HFCA_TIER {

struct Statistics {
  float mean, inverse;  // inverse: of the root of the mean square, or of the standard deviation
};

// Of `count` groups of `width` features, `stride` apart.
inline Statistics statistics_of(const hfca::HeadNorm& norm, const float* x, int64_t count, int64_t stride, int64_t width) {
  const float all = static_cast<float>(count * width);
  float mean = 0.0f, squares = 0.0f;
  if (norm.kind == hfca::NormKind::layer_norm) {
    for (int64_t g = 0; g < count; ++g)
      mean += sum_columns(width, [=](int64_t j, int n) { return load_columns<false>(x + g * stride, j, n); });
    mean /= all;
  }
  const Float centre = Simd::set1(mean);
  for (int64_t g = 0; g < count; ++g)
    squares += sum_columns(width, [=](int64_t j, int n) {
      const Float value = Simd::sub(load_columns<false>(x + g * stride, j, n), centre);
      return Simd::mul(value, value);
    });
  return {mean, 1.0f / __builtin_sqrtf(squares / all + norm.eps)};
}

// out = normalised x, which is head `head`. `all`: the statistics of all heads, where they are normalised together.
inline void normalise_head(const hfca::HeadNorm& norm, const float* x, int64_t head, int64_t head_dim, Statistics all, float* out) {
  const bool shared = norm.scope == hfca::NormScope::head;
  const Statistics s = norm.scope == hfca::NormScope::all_heads ? all : statistics_of(norm, x, 1, 0, head_dim);
  const float* weight = norm.weight ? norm.weight + (shared ? 0 : head * head_dim) : nullptr;
  const float* bias = norm.bias ? norm.bias + (shared ? 0 : head * head_dim) : nullptr;
  const Float centre = Simd::set1(s.mean), inverse = Simd::set1(s.inverse);
  for (int64_t d = 0; d < head_dim; d += Simd::width) {
    const int n = head_dim - d < Simd::width ? static_cast<int>(head_dim - d) : Simd::width;
    Float value = Simd::mul(Simd::sub(load_columns<false>(x, d, n), centre), inverse);
    if (weight) value = Simd::mul(value, load_columns<false>(weight, d, n));
    if (bias) value = Simd::add(value, load_columns<false>(bias, d, n));
    store_columns<false>(out, d, n, value);
  }
}

// The rotary embedding in place (Su et al. 2021, arXiv:2104.09864).
inline void rotate_head(float* x, const float* cos, const float* sin, int64_t rotary_dim, bool interleaved) {
  const int64_t half = rotary_dim / 2;
  if (interleaved) {
    for (int64_t i = 0; i < half; ++i) {
      const float first = x[2 * i], second = x[2 * i + 1];
      x[2 * i] = first * cos[i] - second * sin[i];
      x[2 * i + 1] = second * cos[i] + first * sin[i];
    }
    return;
  }
  for (int64_t i = 0; i < half; i += Simd::width) {
    const int n = half - i < Simd::width ? static_cast<int>(half - i) : Simd::width;
    const Float first = load_columns<false>(x, i, n), second = load_columns<false>(x, half + i, n);
    const Float c = load_columns<false>(cos, i, n), s = load_columns<false>(sin, i, n);
    store_columns<false>(x, i, n, Simd::fnma(second, s, Simd::mul(first, c)));
    store_columns<false>(x, half + i, n, Simd::fma(first, s, Simd::mul(second, c)));
  }
}

template <bool bf16>
inline void copy_features(const float* x, int64_t count, void* out) {
  for (int64_t d = 0; d < count; d += Simd::width) {
    const int n = count - d < Simd::width ? static_cast<int>(count - d) : Simd::width;
    store_columns<bf16>(out, d, n, load_columns<false>(x, d, n));
  }
}

// To the nearest multiples of a 127th of the largest magnitude, which is written behind them. Infinity and NaN make all of them NaN.
inline void quantise_features(const float* x, int64_t count, char* out) {
  Float magnitude = Simd::zero();
  for (int64_t d = 0; d < count; d += Simd::width) magnitude = Simd::highest(magnitude, Simd::abs(load_padded(x, d, count)));
  const float largest = Simd::reduce_highest(magnitude);
  const float scale = largest <= largest_float ? largest / 127.0f : not_a_number;
  const Float inverse = Simd::set1(largest <= largest_float && largest > 1e-33f ? 127.0f / largest : 0.0f), zero = Simd::set1(128.0f);
  for (int64_t d = 0; d < count; d += 4 * Simd::width) {
    uint8_t bytes[4 * Simd::width];  // x + 128
    Float values[4];
    unroll<0, 4>([&](auto v) HFCA_INLINE { values[v] = Simd::fma(load_padded(x, d + v * Simd::width, count), inverse, zero); });
    Simd::store_bytes(bytes, values);
    const int64_t n = count - d < 4 * Simd::width ? count - d : 4 * Simd::width;
    for (int64_t i = 0; i < n; ++i) out[d + i] = static_cast<char>(bytes[i] ^ 0x80);
  }
  std::memcpy(out + count, &scale, sizeof(scale));
}

// To head `head` of the token at which `cache` begins.
inline void store_head(const float* x, int64_t count, const hfca::Heads& cache, int64_t head) {
  char* out = cache.at(head * cache.head_stride);
  switch (cache.type) {
    case hfca::HeadType::float32: return copy_features<false>(x, count, out);
    case hfca::HeadType::bfloat16: return copy_features<true>(x, count, out);
    case hfca::HeadType::int8: return quantise_features(x, count, out);
  }
}

constexpr int64_t largest_head = 1024;  // features, checked by the op

inline void write_heads(const hfca::TokenHeads& t, const float* row, const float* cos, const float* sin, int64_t begin, int64_t end,
                        const hfca::HeadTargets& to) {
  const int64_t group = t.heads / t.kv_heads, dim = t.head_dim;
  const auto all_heads = [&](const hfca::HeadNorm& norm, const hfca::HeadOffsets& offsets, int64_t width) {
    if (norm.kind == hfca::NormKind::none || norm.scope != hfca::NormScope::all_heads) return Statistics{0.0f, 1.0f};
    return statistics_of(norm, row + offsets.first, t.kv_heads, offsets.stride, width);
  };
  const auto finish = [&](const hfca::HeadNorm& norm, Statistics all, const float* x, int64_t head, float* out) {
    if (norm.kind != hfca::NormKind::none) normalise_head(norm, x, head, dim, all, out);
    else copy_features<false>(x, dim, out);
    if (t.rotary_dim > 0) rotate_head(out, cos, sin, t.rotary_dim, t.interleaved);
  };
  if (to.query) {
    const Statistics all = all_heads(t.query_norm, t.query, group * dim);
    for (int64_t h = begin * group; h < end * group; ++h)
      finish(t.query_norm, all, row + t.query.first + h / group * t.query.stride + h % group * dim, h,
             to.query + (h - begin * group) * dim);
  }
  if (!to.key.data) return;
  const Statistics all = all_heads(t.key_norm, t.key, dim);
  alignas(64) float key[largest_head];
  for (int64_t j = begin; j < end; ++j) {
    finish(t.key_norm, all, row + t.key.first + j * t.key.stride, j, key);
    store_head(key, dim, to.key, j);
    store_head(row + t.value.first + j * t.value.stride, t.value_dim, to.value, j);
  }
}

inline void add_scaled(const hfca::Matrix& x, const hfca::Matrix& y, float scale, const hfca::Matrix& sum, int64_t columns, int64_t begin,
                       int64_t end) {
  const Float factor = Simd::set1(scale);
  const auto load = [](const hfca::Matrix& m, const void* row, int64_t j, int n)
                        HFCA_INLINE { return m.bf16 ? load_columns<true>(row, j, n) : load_columns<false>(row, j, n); };
  for (int64_t row = begin; row < end; ++row) {
    const void *left = row_of(x, row), *right = row_of(y, row);
    void* out = row_of(sum, row);
    for (int64_t j = 0; j < columns; j += Simd::width) {
      const int n = columns - j < Simd::width ? static_cast<int>(columns - j) : Simd::width;
      const Float value = Simd::fma(factor, load(y, right, j, n), load(x, left, j, n));
      sum.bf16 ? store_columns<true>(out, j, n, value) : store_columns<false>(out, j, n, value);
    }
  }
}

constexpr hfca::HeadKernels head_kernels() { return {&write_heads, &add_scaled}; }

}  // namespace HFCA_TIER
