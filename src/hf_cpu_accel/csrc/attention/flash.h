// Attention of a block of query rows: loops over blocks of keys, and for each over tiles of rows.
//
// Cost of a task of R rows and K keys: 2 R K (head_dim + value_dim) FLOPs, R K exponentials, K (head_dim + value_dim) elements read
// from memory and packed (once per task: rows amortise it), R (head_dim + value_dim) read and written. A key block (256 keys x 64
// features x 2 x 4 bytes = 128 KB) stays in L2 while tiles of scores (14 x 256 x 4 bytes = 14 KB) live in L1.
#pragma once
#include "one_row.h"
#include "softmax.h"

namespace HFCA_TIER {

constexpr int64_t key_block = 256;

// Scratch of a task of so many rows, carved from one array; without memory it only counts.
struct AttentionScratch {
  AttentionScratch(const hfca::Attention& a, int64_t rows, float* memory) : memory_(memory) {
    head_columns = round_up(a.head_dim, chunk);
    value_columns = round_up(a.value_dim, chunk);
    keys = take(key_block * a.head_dim);
    values = take(key_block * value_columns);
    queries = take(rows * head_columns);
    sums = take(rows * value_columns);
    scores = take(tile_rows * key_block);
    mask = take(key_block);
    maximum = take(rows);
    total = take(rows);
  }

  int64_t head_columns, value_columns, floats = 0;
  float *keys, *values, *queries, *sums, *scores, *mask;
  float *maximum, *total;  // running, per row

 private:
  float* take(int64_t count) {
    const int64_t at = floats;
    floats += round_up(count, 16);
    return memory_ ? memory_ + at : nullptr;
  }

  float* memory_;
};

inline int64_t attention_scratch_floats(const hfca::Attention& a, int64_t rows) { return AttentionScratch(a, rows, nullptr).floats; }

// Rows [row, row + rows) of the task against keys [begin, end), which are packed unless the tile is a single row of few.
inline void attend_tile(const hfca::Attention& a, const hfca::AttentionTask& task, const AttentionScratch& s, int64_t row, int rows, int64_t begin,
                        int64_t end, bool first_block, bool packed) {
  const float infinity = __builtin_inff();
  const int64_t index = row - task.row_begin, distance = static_cast<int64_t>(rows) * chunk;
  int64_t visible[tile_rows], keys = 0;  // keys of this block that a row, that any row may attend
  RowPosition at(a, task, row);
  for (int i = 0; i < rows; ++i, at.step()) {
    const int64_t limit = a.causal ? at.position + a.kv_len - a.q_len + 1 : end;
    visible[i] = limit < begin ? 0 : (limit < end ? limit : end) - begin;
    if (visible[i] > keys) keys = visible[i];
  }
  if (keys == 0 && !first_block) return;
  const float* queries = s.queries + index * s.head_columns;
  if (packed) multiply_chunks(rows, queries, a.head_dim, s.keys, a.head_dim, keys, s.scores, false);
  else score_keys(a, task, queries, begin, keys, s.scores);

  // Pass by pass over all rows, not row by row: the latencies of one row's reduction hide behind the next row's work.
  float maximum[tile_rows];
  at = RowPosition(a, task, row);
  for (int i = 0; i < rows; ++i, at.step()) {
    const int64_t origin = task.batch * a.mask_batch_stride + at.offset(a.mask_head_stride, a.mask_query_stride) + begin;
    maximum[i] = mask_and_maximum(s.scores + i * chunk, distance, visible[i], mask_row(a, origin, visible[i], s.mask));
  }
  float* sums = s.sums + index * s.value_columns;
  for (int i = 0; i < rows; ++i) {
    const float before = s.maximum[index + i], now = maximum[i] > before ? maximum[i] : before;
    const float shift = now == -infinity ? 0.0f : now;  // nothing attended so far: any finite shift gives exp(-infinity) = 0
    const float sum = exponentials(s.scores + i * chunk, distance, visible[i], keys, shift);
    s.maximum[index + i] = now;
    if (first_block) {
      s.total[index + i] = sum;
      continue;
    }
    const float factor = before == now ? 1.0f : exp_nonpositive(before - shift);
    s.total[index + i] = s.total[index + i] * factor + sum;
    if (factor != 1.0f)
      for (int64_t d = 0; d < a.value_dim; d += Simd::width) {
        float* p = sums + (d / chunk * rows + i) * chunk + d % chunk;
        Simd::store(p, Simd::mul(Simd::set1(factor), Simd::load(p)));
      }
  }
  if (packed) multiply_chunks(rows, s.scores, keys, s.values, key_block, a.value_dim, sums, !first_block);
  else weigh_values(a, task, s.scores, begin, keys, sums, !first_block);
}

// output rows = sums / running sum; rows that attended nothing give 0.
inline void write_tile(const hfca::Attention& a, const hfca::AttentionTask& task, const AttentionScratch& s, int64_t row, int rows) {
  const int64_t index = row - task.row_begin;
  const float* sums = s.sums + index * s.value_columns;
  RowPosition at(a, task, row);
  for (int i = 0; i < rows; ++i, at.step()) {
    const float total = s.total[index + i];
    const Float inverse = Simd::set1(total == 0.0f ? 0.0f : 1.0f / total);
    const int64_t origin = task.batch * a.output.batch_stride + at.offset(a.output.head_stride, a.output.position_stride);
    for (int64_t d = 0; d < a.value_dim; d += Simd::width)
      store_features(a.output, origin + d, lanes(a.value_dim - d), Simd::mul(inverse, Simd::load(sums + (d / chunk * rows + i) * chunk + d % chunk)));
  }
}

inline void attend(const hfca::Attention& a, const hfca::AttentionTask& task, float* memory) {
  const int64_t rows = task.row_end - task.row_begin;
  const bool packed = rows > unpacked_rows;
  const int64_t tiles = packed ? (rows + tile_rows - 1) / tile_rows : rows;
  const AttentionScratch s(a, rows, memory);
  const auto each_tile = [&](auto&& f) {  // f(first row, rows); heights nearly equal
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t row = t * rows / tiles;
      f(task.row_begin + row, static_cast<int>((t + 1) * rows / tiles - row));
    }
  };
  for (int64_t i = 0; i < rows; ++i) s.maximum[i] = -__builtin_inff(), s.total[i] = 0.0f;
  each_tile([&](int64_t row, int height) { pack_queries(a, task, row, height, s.queries + (row - task.row_begin) * s.head_columns); });

  int64_t kv_end = task.kv_end;
  if (a.causal) {  // nothing behind the diagonal of the last query of this task
    const bool wraps = task.row_begin / a.q_len != (task.row_end - 1) / a.q_len;
    const int64_t last = wraps ? a.q_len - 1 : (task.row_end - 1) % a.q_len;
    const int64_t limit = last + a.kv_len - a.q_len + 1;
    kv_end = limit < kv_end ? limit : kv_end;
  }
  bool first_block = true;
  for (int64_t begin = task.kv_begin; begin < kv_end || first_block; begin += key_block, first_block = false) {
    const int64_t end = begin + key_block < kv_end ? begin + key_block : kv_end > begin ? kv_end : begin;
    if (packed) {
      pack_keys(a, task, begin, end, s.keys);
      pack_values(a, task, begin, end, key_block, s.values);
    }
    each_tile([&](int64_t row, int height) { attend_tile(a, task, s, row, height, begin, end, first_block, packed); });
  }
  each_tile([&](int64_t row, int height) { write_tile(a, task, s, row, height); });
}

constexpr hfca::AttentionKernels attention_kernels() { return {tile_rows, &attention_scratch_floats, &attend}; }

}  // namespace HFCA_TIER
