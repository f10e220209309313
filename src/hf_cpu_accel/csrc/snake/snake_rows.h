// Row by row, each number read and written once.
#pragma once
#include "../norm/norm_rows.h"
#include "snake.h"

namespace HFCA_TIER {

template <bool bf16>
inline void snake_row(const hfca::Snake& s, const void* in, void* out, int64_t channel) {
  if (s.channels_last) {
    each_vector(s.columns, [&](int64_t i, int n) {
      const Float x = load_columns<bf16>(in, i, n);
      const Float alpha = load_columns<false>(s.alpha, i, n), scale = load_columns<false>(s.scale, i, n);
      store_columns<bf16>(out, i, n, Simd::fma(scale, squared_sine(Simd::mul(alpha, x)), x));
    });
    return;
  }
  const Float alpha = Simd::set1(s.alpha[channel]), scale = Simd::set1(s.scale[channel]);
  each_vector(s.columns, [&](int64_t i, int n) {
    const Float x = load_columns<bf16>(in, i, n);
    store_columns<bf16>(out, i, n, Simd::fma(scale, squared_sine(Simd::mul(alpha, x)), x));
  });
}

inline void snake(const hfca::Snake& s, int64_t begin, int64_t end) {
  const int64_t bytes = s.columns * static_cast<int64_t>(s.bf16 ? sizeof(uint16_t) : sizeof(float));
  for (int64_t row = begin; row < end; ++row) {
    const void* in = static_cast<const char*>(s.input) + row * bytes;
    void* out = static_cast<char*>(s.output) + row * bytes;
    s.bf16 ? snake_row<true>(s, in, out, row % s.channels) : snake_row<false>(s, in, out, row % s.channels);
  }
}

}  // namespace HFCA_TIER
