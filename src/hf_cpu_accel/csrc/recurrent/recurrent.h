// What layers with a recurrent state compute between their projections. Plain data, no torch.
//
//   causal convolution: y[t] = sum over k of weight[k] x[t - taps + 1 + k] + bias, then SiLU if asked for, channel by channel
//   gated delta rule (Yang et al. 2024, arXiv:2412.06464), per head with a state S [key features, value features]:
//                       S[t] = g S[t-1] + k (beta (v - k (g S[t-1])))^T,   o[t] = q S[t],   q and k of length 1
//   Mamba-2 (Dao & Gu 2024, arXiv:2405.21060), per head with a state S [head features, state features]:
//                       S[t] = exp(dt A) S[t-1] + dt x B^T,   y[t] = S[t] C + D x
//   Mamba (Gu & Dao 2023, arXiv:2312.00752), per channel with a state S [state features]:
//                       S[t] = exp(dt A) S[t-1] + dt x B,   y[t] = (S[t] C + D x) SiLU(gate)
//   gated norm:         x / sqrt(mean(x^2) + eps) * weight * SiLU(gate), over groups of columns; the gate comes before the norm or behind
//
// The states are those of the hosts' caches, and are written in place.
#pragma once
#include "../gemm/gemm.h"

namespace hfca {

constexpr int64_t recurrent_chunk = 64;  // tokens that are taken together: what is made of them stays in L2
constexpr int64_t conv_tile = 64;        // channels of one piece of a convolution
constexpr int64_t scan_tile = 64;        // channels of one piece of a selective scan

struct CausalConv {
  Matrix input, gate;  // [batch * length, channels]; gate.data may be null: else the input is multiplied by it
  float* output = nullptr;  // [batch * length, channels]
  Array weight, bias;  // [channels, taps]; [channels] or null
  Array state;  // [batch, channels, taps]: the last inputs
  const bool* tokens = nullptr;  // [batch * length] or null: where it is false the output is 0
  int64_t batch = 0, length = 0, channels = 0, taps = 0;
  bool silu = false;

  int64_t tiles() const { return (channels + conv_tile - 1) / conv_tile; }
  int64_t pieces() const { return batch * tiles(); }
  int64_t buffer() const { return (3 * taps - 1 + recurrent_chunk) * conv_tile; }  // floats
};

struct DeltaRule {
  float* mixed = nullptr;  // [batch * length, channels]: queries, keys, values; values become outputs
  Matrix decay, beta;  // [batch * length, heads], before softplus and sigmoid
  Array A_log, dt_bias;  // [heads]: g = exp(-exp(A_log) softplus(decay + dt_bias))
  float* state = nullptr;  // [batch, heads, key_dim, value_dim]
  int64_t batch = 0, length = 0, channels = 0, heads = 0, key_heads = 0, key_dim = 0, value_dim = 0;

  int64_t pieces() const { return batch * heads; }
};

struct StateSpace {
  float* mixed = nullptr;  // [batch * length, channels]: x, B, C; x becomes y
  Matrix dt;  // [batch * length, heads], before softplus
  Array A_log, D, dt_bias;  // [heads]: A = -exp(A_log)
  float least_dt = 0.0f, most_dt = __builtin_inff();  // bounds of softplus(dt + dt_bias)
  float* state = nullptr;  // [batch, heads, head_dim, state_dim]
  int64_t batch = 0, length = 0, channels = 0, heads = 0, groups = 0, head_dim = 0, state_dim = 0;

  int64_t pieces() const { return batch * heads; }
};

struct SelectiveScan {
  Matrix x, dt, gate, output;  // [batch * length, channels]; dt before softplus
  Matrix B, C;  // [batch * length, state_dim]
  Array A_log, D;  // [channels, state_dim]: A = -exp(A_log); [channels]
  float* state = nullptr;  // [batch, channels, state_dim]
  int64_t batch = 0, length = 0, channels = 0, state_dim = 0;

  int64_t tiles() const { return (channels + scan_tile - 1) / scan_tile; }
  int64_t pieces() const { return batch * tiles(); }
  int64_t buffer() const { return (scan_tile + 2) * state_dim + 3 * scan_tile; }  // floats
};

struct GatedNorm {
  const float* input = nullptr;  // [rows, stride]
  int64_t stride = 0, columns = 0;  // of a group
  Matrix gate, output;  // [rows, groups * columns]
  Array weight;  // [columns] or, `weight_per_group`, [groups * columns]; null: no norm
  bool weight_per_group = false, gate_first = false;
  int64_t rows = 0, groups = 0;
  float eps = 0.0f;
};

// output = input * gate, row by row.
struct GatedRows {
  const float* input = nullptr;  // [rows, columns]
  Matrix gate, output;
  int64_t columns = 0;
};

// A step of a long short-term memory (Hochreiter & Schmidhuber 1997) behind its products. Gates in torch's order: input, forget, cell, output.
//   cell = sigmoid(f) cell + sigmoid(i) tanh(g),   hidden = sigmoid(o) tanh(cell)
struct LstmStep {
  const float* gates = nullptr;  // [batch, 4 * features]
  float *cell = nullptr, *hidden = nullptr;  // [batch, features]
  int64_t batch = 0, features = 0;

  int64_t tiles() const { return (features + conv_tile - 1) / conv_tile; }
  int64_t pieces() const { return batch * tiles(); }
};

struct RecurrentKernels {
  void (*causal_conv)(const CausalConv&, int64_t begin, int64_t end, float* buffer);  // pieces
  int64_t (*delta_rule_buffer)(const DeltaRule&);  // floats
  void (*delta_rule)(const DeltaRule&, int64_t begin, int64_t end, float* buffer);
  void (*state_space)(const StateSpace&, int64_t begin, int64_t end);
  void (*selective_scan)(const SelectiveScan&, int64_t begin, int64_t end, float* buffer);
  void (*gated_norm)(const GatedNorm&, int64_t begin, int64_t end, float* buffer);  // pairs of row and group; a buffer of `columns`
  void (*gated_rows)(const GatedRows&, int64_t begin, int64_t end);
  void (*lstm_step)(const LstmStep&, int64_t begin, int64_t end);  // pieces
};

}  // namespace hfca
