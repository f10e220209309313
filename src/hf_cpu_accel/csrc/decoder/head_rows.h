// Heads of one token: see heads.h. A head is at most a few hundred features and stays in L1 between its passes.
#pragma once
#include "../gemm/pack.h"
#include "../norm/norm_rows.h"
#include "heads.h"

namespace HFCA_TIER {

struct Statistics {
  float mean, inverse;  // inverse: of the root of the mean square, or of the standard deviation
};

// Of `count` heads of `width` features, the first of which is head(0).
template <class Head>
inline Statistics statistics_of(const hfca::HeadNorm& norm, int64_t count, int64_t width, const Head& head) {
  const float all = static_cast<float>(count * width);
  float mean = 0.0f, squares = 0.0f;
  if (norm.kind == hfca::NormKind::layer_norm) {
    for (int64_t h = 0; h < count; ++h) {
      const float* const x = head(h);
      mean += sum_columns(width, [=](int64_t j, int n) { return load_columns<false>(x, j, n); });
    }
    mean /= all;
  }
  const Float center = Simd::set1(mean);
  for (int64_t h = 0; h < count; ++h) {
    const float* const x = head(h);
    squares += sum_columns(width, [=](int64_t j, int n) {
      const Float value = Simd::sub(load_columns<false>(x, j, n), center);
      return Simd::mul(value, value);
    });
  }
  return {mean, 1.0f / __builtin_sqrtf(squares / all + norm.eps)};
}

// Where all heads are normalized together.
template <class Head>
inline Statistics statistics_of_all(const hfca::HeadNorm& norm, int64_t heads, int64_t width, const Head& head) {
  const bool together = norm.kind != hfca::NormKind::none && norm.scope == hfca::NormScope::all_heads;
  return together ? statistics_of(norm, heads, width, head) : Statistics{0.0f, 1.0f};
}

// out = normalized x, which is head `head`. `all`: the statistics of all heads, where they are normalized together.
inline void normalize_head(const hfca::HeadNorm& norm, const float* x, int64_t head, int64_t head_dim, Statistics all, float* out) {
  const bool shared = norm.scope == hfca::NormScope::head;
  const Statistics s = norm.scope == hfca::NormScope::all_heads ? all : statistics_of(norm, 1, head_dim, [=](int64_t) { return x; });
  const float* weight = norm.weight ? norm.weight + (shared ? 0 : head * head_dim) : nullptr;
  const float* bias = norm.bias ? norm.bias + (shared ? 0 : head * head_dim) : nullptr;
  const Float center = Simd::set1(s.mean), inverse = Simd::set1(s.inverse);
  for (int64_t d = 0; d < head_dim; d += Simd::width) {
    const int n = head_dim - d < Simd::width ? static_cast<int>(head_dim - d) : Simd::width;
    Float value = Simd::mul(Simd::sub(load_columns<false>(x, d, n), center), inverse);
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
inline void quantize_features(const float* x, int64_t count, char* out) {
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
    case hfca::HeadType::int8: return quantize_features(x, count, out);
  }
}

constexpr int64_t largest_head = 1024;  // features, checked by the op

inline void write_heads(const hfca::TokenHeads& t, const float* row, const float* cos, const float* sin, int64_t begin, int64_t end,
                        const hfca::HeadTargets& to) {
  const int64_t group = t.heads / t.kv_heads, dim = t.head_dim;
  const auto query_at = [&](int64_t h) { return row + t.query.at(h, group); };
  const auto key_at = [&](int64_t j) { return row + t.key.at(j, 1); };
  const auto finish = [&](const hfca::HeadNorm& norm, Statistics all, const float* x, int64_t head, float* out) {
    if (norm.kind != hfca::NormKind::none) normalize_head(norm, x, head, dim, all, out);
    else copy_features<false>(x, dim, out);
    if (t.rotary_dim > 0) rotate_head(out, cos, sin, t.rotary_dim, t.interleaved);
  };
  if (to.query) {
    const Statistics all = statistics_of_all(t.query_norm, t.heads, dim, query_at);
    for (int64_t h = begin * group; h < end * group; ++h) finish(t.query_norm, all, query_at(h), h, to.query + (h - begin * group) * dim);
  }
  if (!to.key.data) return;
  const Statistics all = statistics_of_all(t.key_norm, t.kv_heads, dim, key_at);
  const auto value_at = [&](int64_t j) { return row + t.value.at(j, 1); };
  const Statistics all_values = statistics_of_all(t.value_norm, t.kv_heads, t.value_dim, value_at);
  alignas(64) float head[largest_head];
  for (int64_t j = begin; j < end; ++j) {
    finish(t.key_norm, all, key_at(j), j, head);
    store_head(head, dim, to.key, j);
    const float* value = value_at(j);
    if (t.value_norm.kind != hfca::NormKind::none) normalize_head(t.value_norm, value, j, t.value_dim, all_values, head), value = head;
    store_head(value, t.value_dim, to.value, j);
  }
}

inline Float gate_of(hfca::GateActivation activation, Float x) {
  return activation == hfca::GateActivation::sigmoid ? sigmoid(x) : softplus(x);
}

inline void finish_context(const hfca::TokenHeads& t, const float* row, const float* context, float* out) {
  const int64_t group = t.heads / t.kv_heads, dim = t.value_dim;
  const Statistics all = statistics_of_all(t.sub_norm, t.heads, dim, [=](int64_t h) { return context + h * dim; });
  for (int64_t h = 0; h < t.heads; ++h) {
    const float* x = context + h * dim;
    float* const y = out + h * dim;
    if (t.sub_norm.kind != hfca::NormKind::none) normalize_head(t.sub_norm, x, h, dim, all, y), x = y;
    if (t.gate.activation == hfca::GateActivation::none) continue;
    const float* const gate = row + t.gate.at.at(h, group);
    Float factor = t.gate.dim == 1 ? gate_of(t.gate.activation, Simd::set1(*gate)) : Simd::zero();
    for (int64_t d = 0; d < dim; d += Simd::width) {
      const int n = dim - d < Simd::width ? static_cast<int>(dim - d) : Simd::width;
      if (t.gate.dim != 1) factor = gate_of(t.gate.activation, load_columns<false>(gate, d, n));
      store_columns<false>(y, d, n, Simd::mul(load_columns<false>(x, d, n), factor));
    }
  }
}

inline void add_scaled(const hfca::Matrix& x, const hfca::Matrix& y, float scale, float factor, const hfca::Matrix& sum, int64_t columns,
                       int64_t begin, int64_t end) {
  const Float inner = Simd::set1(scale), outer = Simd::set1(factor);
  const auto load = [](const hfca::Matrix& m, const void* row, int64_t j, int n)
                        HFCA_INLINE { return m.bf16 ? load_columns<true>(row, j, n) : load_columns<false>(row, j, n); };
  for (int64_t row = begin; row < end; ++row) {
    const void *left = row_of(x, row), *right = row_of(y, row);
    void* out = row_of(sum, row);
    for (int64_t j = 0; j < columns; j += Simd::width) {
      const int n = columns - j < Simd::width ? static_cast<int>(columns - j) : Simd::width;
      const Float value = Simd::mul(outer, Simd::fma(inner, load(y, right, j, n), load(x, left, j, n)));
      sum.bf16 ? store_columns<true>(out, j, n, value) : store_columns<false>(out, j, n, value);
    }
  }
}

constexpr hfca::HeadKernels head_kernels() { return {&write_heads, &finish_context, &add_scaled}; }

}  // namespace HFCA_TIER
