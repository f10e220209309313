// From a row of a qkv projection to query heads that are ready to attend and a key and a value in the cache: norms of heads, rotary
// positions, rounding to the cache's type. And from what attention gave to what its output projection reads: a norm, a gate. Plain
// data, no torch.
#pragma once
#include "../attention/attention.h"
#include "../norm/norm.h"

namespace hfca {

struct HeadNorm {
  NormKind kind = NormKind::none;
  NormScope scope = NormScope::head;
  const float *weight = nullptr, *bias = nullptr;  // null: ones and zeros
  float eps = 0.0f;
};

// Head h of a query or gate, or key or value j, begins `first` + (h / group) * stride + (h % group) * head_stride features into the row.
struct HeadOffsets {
  int64_t first = 0, stride = 0, head_stride = 0;

  int64_t at(int64_t head, int64_t group) const { return first + head / group * stride + head % group * head_stride; }
};

// What the heads of attention's output are multiplied by: activation of as many features as a value has, or of one for a whole head.
struct OutputGate {
  HeadOffsets at;
  int64_t dim = 0;
  GateActivation activation = GateActivation::none;
};

struct TokenHeads {
  int64_t heads = 0, kv_heads = 0, head_dim = 0, value_dim = 0;
  HeadOffsets query, key, value;
  HeadNorm query_norm, key_norm, value_norm;
  int64_t rotary_dim = 0;  // features of a head that are rotated
  bool interleaved = false;  // pairs are features (2i, 2i + 1), not (i, i + rotary_dim / 2)
  HeadNorm sub_norm;  // of attention's output, before the gate
  OutputGate gate;

  bool finishes() const { return sub_norm.kind != NormKind::none || gate.activation != GateActivation::none; }
};

// Where a token's heads go; what is null is left out.
struct HeadTargets {
  float* query = nullptr;  // [heads of the kv heads that are asked for][head_dim]
  Heads key, value;        // the cache, from the token's position on
};

struct HeadKernels {
  // kv heads [begin, end) and their query heads. row: float32; cos, sin: [rotary_dim / 2] of the token's position.
  void (*write)(const TokenHeads&, const float* row, const float* cos, const float* sin, int64_t begin, int64_t end, const HeadTargets&);
  // out [heads][value_dim] = gate(sub_norm(context)) of one token, whose row of the qkv projection is `row`.
  void (*finish)(const TokenHeads&, const float* row, const float* context, float* out);
  // sum[row] = factor * (x[row] + scale * y[row]) for rows [begin, end) of `columns` each; sum may be x or y.
  void (*add_scaled)(const Matrix& x, const Matrix& y, float scale, float factor, const Matrix& sum, int64_t columns, int64_t begin,
                     int64_t end);
};

}  // namespace hfca
