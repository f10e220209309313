// Attention of a block of query rows: loops over blocks of keys, and for each over tiles of rows.
//
// Cost of a task of R rows and K keys: 2 R K (head_dim + value_dim) FLOPs, R K exponentials, K (head_dim + value_dim) elements read
// from memory and packed (once per task: rows amortize it), R (head_dim + value_dim) read and written. A key block (256 keys x 64
// features x 2 x 4 bytes = 128 KB) stays in L2 while tiles of scores (14 x 256 x 4 bytes = 14 KB) live in L1.
#pragma once
#include "arithmetic_bf16.h"
#include "arithmetic_int8.h"
#include "positions.h"

namespace HFCA_TIER {

// What a task keeps between its steps.
template <class Arithmetic>
struct AttentionState {
  AttentionState(const hfca::Attention& a, const hfca::AttentionTask& task, Carver& memory)
      : arithmetic(a, task, memory), positions(arithmetic, a, task, memory) {
    const int64_t rows = task.row_end - task.row_begin;
    value_columns = round_up(a.value_dim, chunk);
    sums = memory.take(rows * value_columns);
    scores = memory.take(Arithmetic::rows_at_once * key_block);
    mask = memory.take(key_block);
    maximum = memory.take(rows);
    total = memory.take(rows);
  }

  Arithmetic arithmetic;
  PositionScores<Arithmetic> positions;
  int64_t value_columns;
  float *sums, *scores, *mask;
  float *maximum, *total;  // running, per row
};

// Rows [row, row + rows) of the task against keys [begin, end), which the arithmetic has taken.
template <class Arithmetic>
inline void attend_tile(const hfca::Attention& a, const hfca::AttentionTask& task, const AttentionState<Arithmetic>& s, int64_t row,
                        int rows, int64_t begin, int64_t end, bool first_block) {
  const float infinity = __builtin_inff();
  const int64_t index = row - task.row_begin, distance = static_cast<int64_t>(rows) * chunk;
  int64_t visible[Arithmetic::rows_at_once], keys = 0;  // keys of this block that a row, that any row may attend
  const auto hidden = [&](int64_t position) { return begin < a.global_keys ? 0 : a.first_visible(position) - begin; };  // before these
  RowPosition at(a, task, row);
  for (int i = 0; i < rows; ++i, at.step()) {
    const int64_t limit = a.causal && begin >= a.global_keys ? at.position + a.kv_len - a.q_len + 1 : end;
    visible[i] = limit < begin ? 0 : (limit < end ? limit : end) - begin;
    if (hidden(at.position) >= visible[i]) visible[i] = 0;
    if (visible[i] > keys) keys = visible[i];
  }
  if (keys == 0 && !first_block) return;
  s.arithmetic.score(row, rows, keys, s.scores);
  s.positions.add_to(s.scores, row, rows, begin, keys);

  // Pass by pass over all rows, not row by row: the latencies of one row's reduction hide behind the next row's work.
  float maximum[Arithmetic::rows_at_once];
  at = RowPosition(a, task, row);
  for (int i = 0; i < rows; ++i, at.step()) {
    const int64_t origin = task.batch * a.mask_batch_stride + at.offset(a.mask_head_stride, a.mask_query_stride) + begin;
    float* scores = s.scores + i * chunk;
    if (a.softcap > 0.0f || a.alibi || a.relative)
      vary_scores(a, at.head, scores, distance, visible[i], at.position + a.kv_len - a.q_len - begin);
    if (const int64_t count = hidden(at.position); count > 0) hide_scores(scores, distance, count < visible[i] ? count : visible[i]);
    maximum[i] = mask_and_maximum(scores, distance, visible[i], mask_row(a, origin, visible[i], s.mask));
  }
  float* sums = s.sums + index * s.value_columns;
  for (int i = 0; i < rows; ++i) {
    const float before = s.maximum[index + i], now = maximum[i] > before ? maximum[i] : before;
    const float shift = now == -infinity ? 0.0f : now;  // nothing attended so far: any finite shift gives exp(-infinity) = 0
    const float sum = s.arithmetic.exponentials(s.scores, rows, i, visible[i], keys, shift);
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
  s.arithmetic.weigh(s.scores, rows, keys, sums, !first_block);
}

// What a row's sums are to be multiplied by, for the maximum and the sum of its exponentials; 0 if it attended nothing.
inline float normalizer(const hfca::Attention& a, int64_t head, float maximum, float total) {
  if (!a.sinks) return total == 0.0f ? 0.0f : 1.0f / total;
  const float sink = a.sinks[head];
  if (maximum == -__builtin_inff()) return 0.0f;
  if (sink <= maximum) return 1.0f / (total + exp_nonpositive(sink - maximum));
  const float factor = exp_nonpositive(maximum - sink);
  return factor / (total * factor + 1.0f);
}

// output rows = sums / running sum.
template <class State>
inline void write_tile(const hfca::Attention& a, const hfca::AttentionTask& task, const State& s, int64_t row, int rows) {
  const int64_t index = row - task.row_begin;
  const float* sums = s.sums + index * s.value_columns;
  RowPosition at(a, task, row);
  for (int i = 0; i < rows; ++i, at.step()) {
    const Float inverse = Simd::set1(normalizer(a, at.head, s.maximum[index + i], s.total[index + i]));
    const int64_t origin = task.batch * a.output.batch_stride + at.offset(a.output.head_stride, a.output.position_stride);
    for (int64_t d = 0; d < a.value_dim; d += Simd::width)
      store_features(a.output, origin + d, lanes(a.value_dim - d),
                     Simd::mul(inverse, Simd::load(sums + (d / chunk * rows + i) * chunk + d % chunk)));
  }
}

// A part of the keys: [rows][value_columns] sums, then the rows' maxima and sums of exponentials.
inline int64_t partial_floats(const hfca::Attention& a, int64_t rows) { return round_up(rows * (round_up(a.value_dim, chunk) + 2), 16); }

template <class State>
inline void write_partial(const hfca::AttentionTask& task, float* partial, const State& s, int64_t row, int rows) {
  const int64_t index = row - task.row_begin, all = task.row_end - task.row_begin;
  const float* sums = s.sums + index * s.value_columns;
  for (int i = 0; i < rows; ++i) {
    for (int64_t d = 0; d < s.value_columns; d += Simd::width)
      Simd::store(partial + (index + i) * s.value_columns + d, Simd::load(sums + (d / chunk * rows + i) * chunk + d % chunk));
    partial[all * s.value_columns + index + i] = s.maximum[index + i];
    partial[all * (s.value_columns + 1) + index + i] = s.total[index + i];
  }
}

// The output of all rows of a task from the partials of its parts.
inline void merge_parts(const hfca::Attention& a, const hfca::AttentionTask& task, int64_t parts) {
  const int64_t rows = task.row_end - task.row_begin, columns = round_up(a.value_dim, chunk), distance = partial_floats(a, rows);
  const auto each = [&](auto&& f) {
    for (int64_t p = 0; p < parts; ++p) f(task.partial + p * distance);
  };
  RowPosition at(a, task, task.row_begin);
  for (int64_t i = 0; i < rows; ++i, at.step()) {
    float maximum = -__builtin_inff(), total = 0.0f;
    each([&](float* part) { maximum = part[rows * columns + i] > maximum ? part[rows * columns + i] : maximum; });
    each([&](float* part) {
      float& factor = part[rows * columns + i];  // the part's maximum before
      factor = maximum == -__builtin_inff() ? 0.0f : exp_nonpositive(factor - maximum);
      total += factor * part[rows * (columns + 1) + i];
    });
    const Float inverse = Simd::set1(normalizer(a, at.head, maximum, total));
    const int64_t origin = task.batch * a.output.batch_stride + at.offset(a.output.head_stride, a.output.position_stride);
    for (int64_t d = 0; d < a.value_dim; d += Simd::width) {
      Float sum = Simd::zero();
      each([&](const float* part) { sum = Simd::fma(Simd::set1(part[rows * columns + i]), Simd::load(part + i * columns + d), sum); });
      store_features(a.output, origin + d, lanes(a.value_dim - d), Simd::mul(inverse, sum));
    }
  }
}

template <class Arithmetic>
inline void attend(const hfca::Attention& a, const hfca::AttentionTask& task, float* memory) {
  Carver carver{memory};
  AttentionState<Arithmetic> s(a, task, carver);
  const int64_t rows = task.row_end - task.row_begin, tiles = (rows + Arithmetic::rows_at_once - 1) / Arithmetic::rows_at_once;
  const auto each_tile = [&](auto&& f) {  // f(first row, rows); heights nearly equal
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t row = t * rows / tiles;
      f(task.row_begin + row, static_cast<int>((t + 1) * rows / tiles - row));
    }
  };
  bool first_block = true;
  const auto begin_anew = [&] {
    for (int64_t i = 0; i < rows; ++i) s.maximum[i] = -__builtin_inff(), s.total[i] = 0.0f;
    first_block = true;
  };
  const auto attend_keys = [&](int64_t begin, int64_t end) {
    s.arithmetic.take_keys(begin, end);
    s.positions.take_keys(begin, end);
    each_tile([&](int64_t row, int height) { attend_tile(a, task, s, row, height, begin, end, first_block); });
    first_block = false;
  };
  const auto write = [&] { each_tile([&](int64_t row, int height) { write_tile(a, task, s, row, height); }); };
  each_tile([&](int64_t row, int height) { s.arithmetic.take_queries(row, height); });
  begin_anew();

  if (task.cut) {
    if (!task.partial) return attend_keys(task.kv_begin, task.kv_end), write();
    float* partial = task.partial;
    for (int64_t begin = task.kv_begin, end; begin < task.kv_end; begin = end, partial += partial_floats(a, rows)) {
      end = task.end_of_part(begin);
      begin_anew();
      attend_keys(begin, end);
      each_tile([&](int64_t row, int height) { write_partial(task, partial, s, row, height); });
    }
    return;
  }

  const bool wraps = task.row_begin / a.q_len != (task.row_end - 1) / a.q_len;
  const int64_t first = a.first_visible(wraps ? 0 : task.row_begin % a.q_len);
  int64_t kv_end = task.kv_end;
  if (a.causal) {  // nothing behind the diagonal of the last query of this task
    const int64_t last = wraps ? a.q_len - 1 : (task.row_end - 1) % a.q_len;
    const int64_t limit = last + a.kv_len - a.q_len + 1;
    kv_end = limit < kv_end ? limit : kv_end;
  }
  const auto attend_blocks = [&](int64_t begin, int64_t end, int64_t most) {
    for (; begin < end; begin += most) attend_keys(begin, begin + most < end ? begin + most : end);
  };
  attend_blocks(task.kv_begin, a.global_keys < task.kv_end ? a.global_keys : task.kv_end, key_block);
  const int64_t begin = first > task.kv_begin ? first : task.kv_begin;
  const bool narrow = a.window > 0 && a.window <= most_narrow && a.window < kv_end - begin && rows > unpacked_rows;
  attend_blocks(begin, kv_end, narrow ? window_block : key_block);
  if (first_block) attend_keys(kv_end, kv_end);  // rows that may attend nothing
  write();
}

template <class T>
struct Type {
  using type = T;
};

template <class Arithmetic>
inline int64_t floats_of(const hfca::Attention& a, int64_t rows) {
  Carver counter{nullptr};
  AttentionState<Arithmetic>(a, {0, 0, 0, rows, 0, 0}, counter);
  return counter.floats;
}

// f(arithmetic) of a task of so many rows.
template <class F>
inline auto with_arithmetic([[maybe_unused]] const hfca::Attention& a, int64_t rows, const F& f) {
  using hfca::HeadType;
  if ((rows <= unpacked_rows || a.q_len <= unpacked_rows) && !a.positions) return f(Type<FewRows>{});
#if HFCA_DOT_INT16
  if (a.quantized && !a.rows && a.key.type != HeadType::int8 && a.head_dim <= ArithmeticInt8::most_features)
    return f(Type<ArithmeticInt8>{});
#endif
#if HFCA_ARITHMETIC_BF16
  if (ArithmeticBf16::takes(a)) return f(Type<ArithmeticBf16>{});
#endif
  return f(Type<ArithmeticF32>{});
}

// Enough for fewer rows as well: FewRows needs the least.
inline int64_t attention_scratch_floats(const hfca::Attention& a, int64_t rows) {
  return with_arithmetic(a, rows, [&](auto type) { return floats_of<typename decltype(type)::type>(a, rows); });
}

inline void run_attention_task(const hfca::Attention& a, const hfca::AttentionTask& task, float* scratch) {
  with_arithmetic(a, task.row_end - task.row_begin, [&](auto type) { attend<typename decltype(type)::type>(a, task, scratch); });
}

inline int64_t position_floats(const hfca::Attention& a) {
  return with_arithmetic(a, 0, [&](auto type) { return position_floats_as<typename decltype(type)::type>(a); });
}

inline void pack_positions(const hfca::Attention& a, int64_t head) {
  with_arithmetic(a, 0, [&](auto type) { pack_positions_as<typename decltype(type)::type>(a, head); });
}

constexpr hfca::AttentionKernels attention_kernels() {
  return {tile_rows,           unpacked_rows, &attention_scratch_floats, &partial_floats,
          &run_attention_task, &merge_parts,  &position_floats,          &pack_positions};
}

}  // namespace HFCA_TIER
