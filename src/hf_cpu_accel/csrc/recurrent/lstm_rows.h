// What a step of a long short-term memory does with its gates.
#pragma once
#include "causal_conv_rows.h"

namespace HFCA_TIER {

// Pieces: tiles of features of one sequence after another.
inline void lstm_step(const hfca::LstmStep& s, int64_t begin, int64_t end) {
  for (int64_t piece = begin; piece < end; ++piece) {
    const int64_t row = piece / s.tiles(), first = piece % s.tiles() * hfca::conv_tile, left = s.features - first;
    const float* gates = s.gates + row * 4 * s.features + first;
    float *cell = s.cell + row * s.features + first, *hidden = s.hidden + row * s.features + first;
    each_vector(left < hfca::conv_tile ? left : hfca::conv_tile, [&](int64_t j, int n) HFCA_INLINE {
      const auto gate = [&](int64_t number) HFCA_INLINE { return load_columns<false>(gates + number * s.features, j, n); };
      const Float kept = Simd::mul(sigmoid(gate(1)), load_columns<false>(cell, j, n));
      const Float next = Simd::fma(sigmoid(gate(0)), tanh(gate(2)), kept);
      store_columns<false>(cell, j, n, next);
      store_columns<false>(hidden, j, n, Simd::mul(sigmoid(gate(3)), tanh(next)));
    });
  }
}

}  // namespace HFCA_TIER
