// Mamba's recurrence: a tile of channels of one sequence at a time, whose states stay in L1 from the first token to the last.
#pragma once
#include "delta_rule_rows.h"

namespace HFCA_TIER {

// Of a tile of `wide` channels from `channel` on, for one token. A and states are [wide, state_dim], the rest [wide] or [state_dim].
struct ScanStep {
  const float *A, *B, *C, *dt, *input;  // input: dt x
  float *state, *sum;                   // sum: S C
  int64_t wide, state_dim;
};

inline void scan_token(const ScanStep& step) {
  for (int64_t c = 0; c < step.wide; ++c) {
    const float* A = step.A + c * step.state_dim;
    float* state = step.state + c * step.state_dim;
    const Float dt = Simd::set1(step.dt[c]), input = Simd::set1(step.input[c]);
    Float sum = Simd::zero();
    each_vector(step.state_dim, [&](int64_t j, int n) HFCA_INLINE {
      const Float decay = exp(Simd::mul(dt, load_columns<false>(A, j, n)));
      const Float kept = Simd::mul(decay, load_columns<false>(state, j, n));
      const Float next = Simd::fma(input, load_columns<false>(step.B, j, n), kept);
      store_columns<false>(state, j, n, next);
      sum = Simd::fma(next, load_columns<false>(step.C, j, n), sum);
    });
    step.sum[c] = Simd::reduce_add(sum);
  }
}

// Pairs of sequence and tile of channels.
inline void selective_scan(const hfca::SelectiveScan& s, int64_t begin, int64_t end, float* buffer) {
  constexpr int64_t tile = hfca::scan_tile;
  float *A = buffer, *B = A + tile * s.state_dim, *C = B + s.state_dim, *dt = C + s.state_dim, *input = dt + tile, *sum = input + tile;
  for (int64_t piece = begin; piece < end; ++piece) {
    const int64_t sequence = piece / s.tiles(), channel = piece % s.tiles() * tile;
    const int64_t wide = s.channels - channel < tile ? s.channels - channel : tile, values = wide * s.state_dim;
    float* state = s.state + (sequence * s.channels + channel) * s.state_dim;
    ask_for(state + values, values * static_cast<int64_t>(sizeof(float)));
    const void* logarithms = element_of(s.A_log, channel * s.state_dim);
    each_vector(values, [&](int64_t j, int n) {
      const Float power = exp(load_any_columns(s.A_log.bf16, logarithms, j, n));
      store_columns<false>(A, j, n, Simd::sub(Simd::zero(), power));
    });
    for (int64_t t = 0; t < s.length; ++t) {
      const int64_t row = sequence * s.length + t;
      const void *x = row_of(s.x, row), *steps = row_of(s.dt, row), *gate = row_of(s.gate, row);
      const void *row_B = row_of(s.B, row), *row_C = row_of(s.C, row);
      void* out = row_of(s.output, row);
      each_vector(wide, [&](int64_t j, int n) {
        const Float length = softplus(load_any_columns(s.dt.bf16, steps, channel + j, n));
        store_columns<false>(dt, j, n, length);
        store_columns<false>(input, j, n, Simd::mul(length, load_any_columns(s.x.bf16, x, channel + j, n)));
      });
      each_vector(s.state_dim, [&](int64_t j, int n) {
        store_columns<false>(B, j, n, load_any_columns(s.B.bf16, row_B, j, n));
        store_columns<false>(C, j, n, load_any_columns(s.C.bf16, row_C, j, n));
      });
      scan_token({A, B, C, dt, input, state, sum, wide, s.state_dim});
      each_vector(wide, [&](int64_t j, int n) {
        const Float skip = load_any_columns(s.D.bf16, s.D.data, channel + j, n);
        const Float y = Simd::fma(skip, load_any_columns(s.x.bf16, x, channel + j, n), load_columns<false>(sum, j, n));
        store_any_columns(s.output.bf16, out, channel + j, n, Simd::mul(y, silu(load_any_columns(s.gate.bf16, gate, channel + j, n))));
      });
    }
  }
}

}  // namespace HFCA_TIER
