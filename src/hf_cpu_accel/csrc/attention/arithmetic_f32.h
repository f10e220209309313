// Attention's arithmetic in float32. An arithmetic takes queries and keys, and multiplies with them and with the values; flash.h has the
// loops.
#pragma once
#include "scratch.h"
#include "softmax.h"

namespace HFCA_TIER {

// What does not depend on where the keys and values are read from.
class QueriesF32 {
 public:
  QueriesF32(const hfca::Attention& a, const hfca::AttentionTask& task, Carver& memory)
      : a_(a),
        task_(task),
        head_columns_(round_up(a.head_dim, chunk)),
        queries_(memory.take((task.row_end - task.row_begin) * head_columns_)) {}

  void take_queries(int64_t row, int rows) const { pack_queries(a_, task_, row, rows, queries_of(row)); }

  // Row i of a tile of scores becomes probabilities, times a factor that is the same for all; returns their sum.
  float exponentials(float* scores, int rows, int i, int64_t visible, int64_t keys, float shift) const {
    return HFCA_TIER::exponentials(scores + i * chunk, static_cast<int64_t>(rows) * chunk, visible, keys, shift);
  }

 protected:
  float* queries_of(int64_t row) const { return queries_ + (row - task_.row_begin) * head_columns_; }

  const hfca::Attention& a_;
  const hfca::AttentionTask& task_;

 private:
  int64_t head_columns_;
  float* queries_;
};

// For many rows, which share packed keys and values.
class ArithmeticF32 : public QueriesF32 {
 public:
  static constexpr int rows_at_once = tile_rows;  // that are computed together

  ArithmeticF32(const hfca::Attention& a, const hfca::AttentionTask& task, Carver& memory)
      : QueriesF32(a, task, memory),
        keys_(memory.take(key_block * a.head_dim)),
        values_(memory.take(key_block * round_up(a.value_dim, chunk))) {}

  void take_keys(int64_t begin, int64_t end) const {
    with_head_type(a_.key, [&](auto type) { pack_keys<decltype(type)::value>(a_, task_, begin, end, keys_); });
    with_head_type(a_.value, [&](auto type) { pack_values<decltype(type)::value>(a_, task_, begin, end, key_block, values_); });
  }

  // scores[keys / 32][rows][32] of rows [row, row + rows) for the first `keys` of the keys taken.
  void score(int64_t row, int rows, int64_t keys, float* scores) const {
    multiply_chunks<DotF32>(rows, as_words(queries_of(row)), a_.head_dim, as_words(keys_), a_.head_dim, keys, scores, false);
  }

  // sums[value_dim / 32][rows][32] (+)= probabilities @ values.
  void weigh(const float* probabilities, int rows, int64_t keys, float* sums, bool accumulate) const {
    multiply_chunks<DotF32>(rows, as_words(probabilities), keys, as_words(values_), key_block, a_.value_dim, sums, accumulate);
  }

 private:
  float *keys_, *values_;
};

}  // namespace HFCA_TIER
