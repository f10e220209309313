// See token_rows.h.
#pragma once
#include "../norm/norm_rows.h"
#include "token_rows.h"

namespace HFCA_TIER {

inline Float load_any_columns(bool bf16, const void* row, int64_t column, int n) {
  return bf16 ? load_columns<true>(row, column, n) : load_columns<false>(row, column, n);
}

inline void store_any_columns(bool bf16, void* row, int64_t column, int n, Float x) {
  bf16 ? store_columns<true>(row, column, n, x) : store_columns<false>(row, column, n, x);
}

inline const void* element_of(const hfca::Array& array, int64_t at) {
  return static_cast<const char*>(array.data) + at * static_cast<int64_t>(array.bf16 ? sizeof(uint16_t) : sizeof(float));
}

inline void rotate_tokens(const hfca::Rotation& r, const hfca::Matrix& x, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token) {
    const int64_t place = r.index ? r.index[token] : token;
    const int64_t at = place / r.length * r.batch_stride + place % r.length * r.position_stride;
    const void *cos = element_of(r.cos, at), *sin = element_of(r.sin, at);
    void* row = row_of(x, token);
    each_vector(r.half, [&](int64_t i, int n) {
      const Float c = load_any_columns(r.cos.bf16, cos, i, n), s = load_any_columns(r.sin.bf16, sin, i, n);
      for (int64_t head = 0; head < r.heads; ++head) {
        const int64_t low = head * r.head_size + i, high = low + r.half;
        const Float first = load_any_columns(x.bf16, row, low, n), second = load_any_columns(x.bf16, row, high, n);
        store_any_columns(x.bf16, row, low, n, Simd::fnma(second, s, Simd::mul(first, c)));
        store_any_columns(x.bf16, row, high, n, Simd::fma(first, s, Simd::mul(second, c)));
      }
    });
  }
}

inline void add_scaled_rows(const hfca::Matrix& x, const hfca::Matrix& branch, const hfca::Array& layer_scale, const hfca::Matrix& sum,
                            int64_t columns, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const void *left = row_of(x, row), *right = row_of(branch, row);
    void* out = row_of(sum, row);
    each_vector(columns, [&](int64_t j, int n) {
      const Float factor = load_any_columns(layer_scale.bf16, layer_scale.data, j, n);
      const Float value = Simd::fma(factor, load_any_columns(branch.bf16, right, j, n), load_any_columns(x.bf16, left, j, n));
      store_any_columns(sum.bf16, out, j, n, value);
    });
  }
}

constexpr hfca::TokenRowKernels token_row_kernels() { return {&rotate_tokens, &add_scaled_rows}; }

}  // namespace HFCA_TIER
