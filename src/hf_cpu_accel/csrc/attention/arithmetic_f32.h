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
      : a_(a), task_(task), queries_(memory, task.row_end - task.row_begin, round_up(a.head_dim, chunk)) {}

  void take_queries(int64_t row, int rows) const {
    int64_t at[tile_rows];
    locate_queries(a_, task_, row, rows, at);
    pack(a_.query, at, rows, queries_of(row));
  }

  // Rows of x, which begin at elements at[i], as one tile.
  void pack(const hfca::Heads& x, const int64_t* at, int rows, const PackedQueries& to) const {
    pack_queries(x, at, rows, a_.head_dim, a_.scale, as_floats(to.data));
  }

  PackedQueries queries_of(int64_t row) const { return queries_.from(row - task_.row_begin); }

  // Row i of a tile of scores becomes probabilities, times a factor that is the same for all; returns their sum.
  float exponentials(float* scores, int rows, int i, int64_t visible, int64_t keys, float shift) const {
    return HFCA_TIER::exponentials(scores + i * chunk, static_cast<int64_t>(rows) * chunk, visible, keys, shift);
  }

 protected:
  static float* as_floats(uint32_t* words) { return reinterpret_cast<float*>(words); }

  const hfca::Attention& a_;
  const hfca::AttentionTask& task_;

 private:
  PackedQueries queries_;
};

// For many rows, which share packed keys and values.
class ArithmeticF32 : public QueriesF32 {
 public:
  static constexpr int rows_at_once = tile_rows;  // that are computed together

  ArithmeticF32(const hfca::Attention& a, const hfca::AttentionTask& task, Carver& memory)
      : QueriesF32(a, task, memory), keys_(memory, key_block, a.head_dim), values_(memory.take(key_block * round_up(a.value_dim, chunk))) {}

  void take_keys(int64_t begin, int64_t end) const {
    const int64_t origin = task_.kv_head * a_.key.head_stride;
    pack(
        a_.key,
        [&](int64_t k) {
          return origin + a_.batch_of_key(begin + k, task_.batch) * a_.key.batch_stride + (begin + k) * a_.key.position_stride;
        },
        end - begin, keys_);
    with_head_type(a_.value, [&](auto type) { pack_values<decltype(type)::value>(a_, task_, begin, end, key_block, values_); });
  }

  // Keys of x, which begin at elements at(k).
  template <class At>
  void pack(const hfca::Heads& x, const At& at, int64_t count, const PackedKeys& to) const {
    with_head_type(x, [&](auto type) { pack_keys<decltype(type)::value>(x, at, a_.head_dim, count, as_floats(to.data)); });
  }
  using QueriesF32::pack;

  // scores[keys / 32][rows][32] of a tile of queries for the first `keys` keys.
  void score(const PackedQueries& queries, int rows, const PackedKeys& packed, int64_t keys, float* scores) const {
    multiply_chunks<DotF32>(rows, queries.data, a_.head_dim, packed.data, a_.head_dim, keys, scores, false);
  }

  // The same of rows [row, row + rows) for the keys taken.
  void score(int64_t row, int rows, int64_t keys, float* scores) const { score(queries_of(row), rows, keys_, keys, scores); }

  const PackedKeys& keys() const { return keys_; }

  // sums[value_dim / 32][rows][32] (+)= probabilities @ values.
  void weigh(const float* probabilities, int rows, int64_t keys, float* sums, bool accumulate) const {
    multiply_chunks<DotF32>(rows, as_words(probabilities), keys, as_words(values_), key_block, a_.value_dim, sums, accumulate);
  }

 private:
  PackedKeys keys_;
  float* values_;
};

}  // namespace HFCA_TIER
