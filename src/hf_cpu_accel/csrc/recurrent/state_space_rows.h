// Mamba-2's recurrence, token by token: the rows of a state do not depend on one another, so that four of them stay in L1 for a chunk of
// tokens and share what is read of B and C.
#pragma once
#include "lstm_rows.h"
#include "selective_scan_rows.h"

namespace HFCA_TIER {

struct StateStep {
  float decay[hfca::recurrent_chunk], dt[hfca::recurrent_chunk];  // of each token of a chunk: exp(dt A), dt
  const float *B, *C;                                              // of the first token
  int64_t count, channels, state_dim;
};

// `rows` rows of a head's state; x [rows] of each token becomes y.
template <int rows>
inline void state_rows(const StateStep& step, float D, float* state, float* x) {
  for (int64_t t = 0; t < step.count; ++t, x += step.channels) {
    const float *B = step.B + t * step.channels, *C = step.C + t * step.channels;
    const Float decay = Simd::set1(step.decay[t]);
    Float input[rows], sum[rows];
    unroll<0, rows>([&](auto r) HFCA_INLINE { input[r] = Simd::set1(step.dt[t] * x[r]), sum[r] = Simd::zero(); });
    each_vector(step.state_dim, [&](int64_t j, int n) HFCA_INLINE {
      const Float b = load_columns<false>(B, j, n), c = load_columns<false>(C, j, n);
      unroll<0, rows>([&](auto r) HFCA_INLINE {
        float* s = state + r * step.state_dim;
        const Float next = Simd::fma(input[r], b, Simd::mul(decay, load_columns<false>(s, j, n)));
        store_columns<false>(s, j, n, next);
        sum[r] = Simd::fma(next, c, sum[r]);
      });
    });
    unroll<0, rows>([&](auto r) HFCA_INLINE { x[r] = Simd::reduce_add(sum[r]) + D * x[r]; });
  }
}

// Pairs of sequence and head.
inline void state_space(const hfca::StateSpace& s, int64_t begin, int64_t end) {
  constexpr int together = 4;
  constexpr int64_t ahead = 1024;  // floats
  StateStep step;
  step.channels = s.channels, step.state_dim = s.state_dim;
  for (int64_t piece = begin; piece < end; ++piece) {
    const int64_t sequence = piece / s.heads, head = piece % s.heads, group = head / (s.heads / s.groups);
    float* state = s.state + piece * s.head_dim * s.state_dim;
    const float A = -power(value_at(s.A_log, head)), D = value_at(s.D, head), bias = value_at(s.dt_bias, head);
    for (int64_t first = 0; first < s.length; first += step.count) {
      step.count = s.length - first < hfca::recurrent_chunk ? s.length - first : hfca::recurrent_chunk;
      const int64_t row = sequence * s.length + first;
      float* x = s.mixed + row * s.channels + head * s.head_dim;
      step.B = s.mixed + row * s.channels + s.heads * s.head_dim + group * s.state_dim;
      step.C = step.B + s.groups * s.state_dim;
      for (int64_t t = 0; t < step.count; ++t) {
        const float dt = softplus(value_at(s.dt, row + t, head) + bias);
        step.dt[t] = dt < s.least_dt ? s.least_dt : dt > s.most_dt ? s.most_dt : dt;  // NaN stays
        step.decay[t] = power(step.dt[t] * A);
      }
      int64_t p = 0;
      for (; p + together <= s.head_dim; p += together) {
        float* rows = state + p * s.state_dim;
        ask_for(rows + ahead, together * s.state_dim * static_cast<int64_t>(sizeof(float)));
        state_rows<together>(step, D, rows, x + p);
      }
      for (; p < s.head_dim; ++p) state_rows<1>(step, D, state + p * s.state_dim, x + p);
    }
  }
}

constexpr hfca::RecurrentKernels recurrent_kernels() {
  return {&causal_conv, &delta_rule_buffer, &delta_rule, &state_space, &selective_scan, &gated_norm, &gated_rows, &lstm_step};
}

}  // namespace HFCA_TIER
