// The gated delta rule, token by token: the columns of a state do not depend on one another, so that a block of them stays in L1 for
// many tokens and both passes over it run at the rate of its multiplications. Chunks of tokens as matrix products, as GPUs compute
// it, would take more multiplications.
#pragma once
#include "causal_conv_rows.h"

namespace HFCA_TIER {

inline float value_at(const hfca::Matrix& x, int64_t row, int64_t column) {
  return Simd::reduce_add(load_any_columns(x.bf16, row_of(x, row), column, 1));
}

inline float value_at(const hfca::Array& x, int64_t at) { return Simd::reduce_add(load_any_columns(x.bf16, x.data, at, 1)); }

inline float power(float x) { return Simd::reduce_max(exp(Simd::set1(x))); }

constexpr int delta_vectors = 4;  // of a block of columns: two sums of them hide the latency of the multiplications
constexpr int64_t delta_columns = delta_vectors * Simd::width;

// What a chunk of tokens has for one head: the buffer of a thread.
struct DeltaTokens {
  DeltaTokens(const hfca::DeltaRule& d, float* buffer)
      : query(buffer),
        key(query + hfca::recurrent_chunk * d.key_dim),
        decay(key + hfca::recurrent_chunk * d.key_dim),
        beta(decay + hfca::recurrent_chunk),
        product(beta + hfca::recurrent_chunk),
        block(product + hfca::recurrent_chunk) {}
  static int64_t size(const hfca::DeltaRule& d) {
    return 2 * hfca::recurrent_chunk * d.key_dim + 3 * hfca::recurrent_chunk + d.key_dim * delta_columns;
  }

  float *query, *key;             // [tokens, key_dim], of length 1 (queries: 1 / sqrt(key_dim))
  float *decay, *beta, *product;  // [tokens]: g, beta, query times key
  float* block;                   // [key_dim, delta_columns] of the state
};

inline int64_t delta_rule_buffer(const hfca::DeltaRule& d) { return DeltaTokens::size(d); }

inline void normalize(const float* x, int64_t features, float factor, float* to) {
  const float squares = sum_columns(features, [=](int64_t j, int n) HFCA_INLINE {
    const Float value = load_columns<false>(x, j, n);
    return Simd::mul(value, value);
  });
  const Float scale = Simd::set1(factor / __builtin_sqrtf(squares + 1e-6f));
  each_vector(features, [=](int64_t j, int n) { store_columns<false>(to, j, n, Simd::mul(load_columns<false>(x, j, n), scale)); });
}

inline void read_tokens(const hfca::DeltaRule& d, int64_t row, int64_t count, int64_t head, const DeltaTokens& tokens) {
  const int64_t key_head = head / (d.heads / d.key_heads);
  const float factor = 1.0f / __builtin_sqrtf(static_cast<float>(d.key_dim));
  const float A = -power(value_at(d.A_log, head)), bias = value_at(d.dt_bias, head);
  for (int64_t t = 0; t < count; ++t) {
    const float* query = d.mixed + (row + t) * d.channels + key_head * d.key_dim;
    float *q = tokens.query + t * d.key_dim, *k = tokens.key + t * d.key_dim;
    normalize(query, d.key_dim, factor, q);
    normalize(query + d.key_heads * d.key_dim, d.key_dim, 1.0f, k);
    tokens.product[t] = sum_columns(
        d.key_dim, [=](int64_t j, int n) HFCA_INLINE { return Simd::mul(load_columns<false>(q, j, n), load_columns<false>(k, j, n)); });
    tokens.decay[t] = power(A * softplus(value_at(d.decay, row + t, head) + bias));
    tokens.beta[t] = Simd::reduce_max(sigmoid(Simd::set1(value_at(d.beta, row + t, head))));
  }
}

// One token for the block of columns: `values` [columns] become its outputs.
inline void delta_token(const float* query, const float* key, float decay, float beta, float product, int64_t key_dim, float* block,
                        float* values, int64_t columns) {
  Float by_key[delta_vectors], by_query[delta_vectors], delta[delta_vectors];
  unroll<0, delta_vectors>([&](auto v) HFCA_INLINE { by_key[v] = by_query[v] = Simd::zero(); });
  for (int64_t i = 0; i < key_dim; ++i) {
    const Float k = Simd::set1(key[i]), q = Simd::set1(query[i]);
    unroll<0, delta_vectors>([&](auto v) HFCA_INLINE {
      const Float s = Simd::load(block + i * delta_columns + v * Simd::width);
      by_key[v] = Simd::fma(k, s, by_key[v]);
      by_query[v] = Simd::fma(q, s, by_query[v]);
    });
  }
  const Float g = Simd::set1(decay), b = Simd::set1(beta), qk = Simd::set1(product);
  unroll<0, delta_vectors>([&](auto v) HFCA_INLINE {
    const int64_t rest = columns - v * Simd::width;
    const int n = rest >= Simd::width ? Simd::width : rest > 0 ? static_cast<int>(rest) : 0;
    delta[v] = Simd::mul(b, Simd::fnma(g, by_key[v], load_columns<false>(values, v * Simd::width, n)));
    store_columns<false>(values, v * Simd::width, n, Simd::fma(qk, delta[v], Simd::mul(g, by_query[v])));
  });
  for (int64_t i = 0; i < key_dim; ++i) {
    const Float k = Simd::set1(key[i]);
    unroll<0, delta_vectors>([&](auto v) HFCA_INLINE {
      float* s = block + i * delta_columns + v * Simd::width;
      Simd::store(s, Simd::fma(k, delta[v], Simd::mul(g, Simd::load(s))));
    });
  }
}

// Pairs of sequence and head.
inline void delta_rule(const hfca::DeltaRule& d, int64_t begin, int64_t end, float* buffer) {
  const DeltaTokens tokens(d, buffer);
  for (int64_t piece = begin; piece < end; ++piece) {
    const int64_t sequence = piece / d.heads, head = piece % d.heads;
    float* state = d.state + piece * d.key_dim * d.value_dim;
    for (int64_t first = 0, count; first < d.length; first += count) {
      count = d.length - first < hfca::recurrent_chunk ? d.length - first : hfca::recurrent_chunk;
      const int64_t row = sequence * d.length + first;
      read_tokens(d, row, count, head, tokens);
      float* values = d.mixed + row * d.channels + 2 * d.key_heads * d.key_dim + head * d.value_dim;
      for (int64_t column = 0; column < d.value_dim; column += delta_columns) {
        const int64_t columns = d.value_dim - column < delta_columns ? d.value_dim - column : delta_columns;
        const auto each_row = [&](const auto& f) HFCA_INLINE {
          for (int64_t i = 0; i < d.key_dim; ++i) {
            float *s = state + i * d.value_dim + column, *dense = tokens.block + i * delta_columns;
            each_vector(columns, [&](int64_t j, int n) { f(s + j, dense + j, n); });
          }
        };
        const bool last = column + delta_columns >= d.value_dim;
        const int64_t next = last ? d.key_dim * d.value_dim - column : delta_columns;  // the block after this one
        each_row([=](const float* s, float* dense, int n) HFCA_INLINE {
          ask_for(s + next, 1);
          Simd::store(dense, load_columns<false>(s, 0, n));
        });
        for (int64_t j = (columns + Simd::width - 1) / Simd::width * Simd::width; j < delta_columns; j += Simd::width) {
          for (int64_t i = 0; i < d.key_dim; ++i) Simd::store(tokens.block + i * delta_columns + j, Simd::zero());
        }
        for (int64_t t = 0; t < count; ++t) {
          delta_token(tokens.query + t * d.key_dim, tokens.key + t * d.key_dim, tokens.decay[t], tokens.beta[t], tokens.product[t],
                      d.key_dim, tokens.block, values + t * d.channels + column, columns);
        }
        each_row([](float* s, const float* dense, int n) HFCA_INLINE { store_columns<false>(s, 0, n, Simd::load(dense)); });
      }
    }
  }
}

}  // namespace HFCA_TIER
