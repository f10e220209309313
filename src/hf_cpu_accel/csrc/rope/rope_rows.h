// Token by token: the tables are read once for all heads, each head is read and written once.
#pragma once
#include "../encoder/token_row_steps.h"
#include "rope.h"

namespace HFCA_TIER {

template <bool bf16>
inline void rotate_halves(const hfca::RotaryEmbedding& r, const void* cos, const void* sin, const char* in, char* out) {
  constexpr int64_t element = bf16 ? sizeof(uint16_t) : sizeof(float);
  const int64_t half = r.features / 2;
  each_vector(half, [&](int64_t i, int n) {
    const Float low_cos = load_any_columns(r.cos.values.bf16, cos, i, n), high_cos = load_any_columns(r.cos.values.bf16, cos, half + i, n);
    const Float low_sin = load_any_columns(r.sin.values.bf16, sin, i, n), high_sin = load_any_columns(r.sin.values.bf16, sin, half + i, n);
    for (int64_t head = 0; head < r.heads; ++head) {
      const char* from = in + head * r.input.head_stride * element;
      char* to = out + head * r.output.head_stride * element;
      const Float low = load_columns<bf16>(from, i, n), high = load_columns<bf16>(from, half + i, n);
      store_columns<bf16>(to, i, n, Simd::fnma(high, low_sin, Simd::mul(low, low_cos)));
      store_columns<bf16>(to, half + i, n, Simd::fma(low, high_sin, Simd::mul(high, high_cos)));
    }
  });
}

template <bool bf16>
inline void rotate_pairs(const hfca::RotaryEmbedding& r, const void* cos, const void* sin, const char* in, char* out) {
  constexpr int64_t element = bf16 ? sizeof(uint16_t) : sizeof(float);
  each_vector(r.features, [&](int64_t i, int n) {
    const Float c = load_any_columns(r.cos.values.bf16, cos, i, n), s = load_any_columns(r.sin.values.bf16, sin, i, n);
    for (int64_t head = 0; head < r.heads; ++head) {
      const Float x = load_columns<bf16>(in + head * r.input.head_stride * element, i, n);
      store_columns<bf16>(out + head * r.output.head_stride * element, i, n, Simd::rotate_pairs(x, c, s));
    }
  });
}

inline void rotary_embedding(const hfca::RotaryEmbedding& r, int64_t begin, int64_t end) {
  const int64_t element = r.input.bf16 ? sizeof(uint16_t) : sizeof(float);
  const auto at = [](const hfca::RotaryTable& table, int64_t batch, int64_t position)
                      HFCA_INLINE { return element_of(table.values, batch * table.batch_stride + position * table.position_stride); };
  for (int64_t token = begin; token < end; ++token) {
    const int64_t batch = token / r.length, position = token % r.length;
    const void *cos = at(r.cos, batch, position), *sin = at(r.sin, batch, position);
    const char* in = static_cast<const char*>(r.input.data) + (batch * r.input.batch_stride + position * r.input.position_stride) * element;
    char* out = static_cast<char*>(r.output.data) + (batch * r.output.batch_stride + position * r.output.position_stride) * element;
    if (r.input.bf16) r.interleaved ? rotate_pairs<true>(r, cos, sin, in, out) : rotate_halves<true>(r, cos, sin, in, out);
    else r.interleaved ? rotate_pairs<false>(r, cos, sin, in, out) : rotate_halves<false>(r, cos, sin, in, out);
  }
}

}  // namespace HFCA_TIER
