// What scores gain for relative positions: see RelativePositions.
//
// A query meets one position for each key. Queries q..q + R - 1 and K keys have R + K - 1 between them, which lie side by side in the
// packed table: the product is that of a tile with so many columns, and row i of it begins one column before row i - 1. The positions that
// keys meet are the rows of a product with packed keys likewise, in which key k is one row behind key k - 1.
//
// Cost beside the product of queries and keys: (K + R + 32) / K of it for queries, (rows of the task + 32 + R) / rows of it for keys.
#pragma once
#include "few_rows.h"

namespace HFCA_TIER {

// The tables of one head: column c of `keys` is that of a key c - length + 1 tokens behind the query, row r of `queries` that of a key
// r - 32 - length + 1 tokens before it. The rows in front are for the keys that fill up a chunk.
template <class Arithmetic>
struct PackedPositions {
  PackedKeys keys;
  PackedQueries queries;

  PackedPositions(const Arithmetic& arithmetic, const hfca::RelativePositions& p, Carver& memory)
      : keys(memory, p.key.data ? p.count() : 0, arithmetic.keys().words),
        queries(memory, p.query.data ? row_count(p) : 0, arithmetic.queries_of(0).words) {}

  static int64_t row_count(const hfca::RelativePositions& p) { return p.count() + chunk; }

  void pack(const Arithmetic& arithmetic, const hfca::RelativePositions& p, int64_t head) const {
    const auto at = [&](const hfca::Heads& x, int64_t i) { return head * x.head_stride + p.row(i) * x.position_stride; };
    if (p.key.data) arithmetic.pack(p.key, [&](int64_t c) { return at(p.key, p.count() - 1 - c); }, p.count(), keys);
    if (!p.query.data) return;
    for (int64_t r = 0; r < row_count(p); r += Arithmetic::rows_at_once) {
      int64_t rows[Arithmetic::rows_at_once];
      const int height = height_of(p, r);
      for (int i = 0; i < height; ++i) rows[i] = at(p.query, r + i - chunk);
      arithmetic.pack(p.query, rows, height, queries.from(r));
    }
  }

  // Of the tile of `queries` that begins with row r.
  static int height_of(const hfca::RelativePositions& p, int64_t r) {
    const int64_t left = row_count(p) - r;
    return left < Arithmetic::rows_at_once ? static_cast<int>(left) : Arithmetic::rows_at_once;
  }
};

// The part of a task that has to do with them.
template <class Arithmetic>
class PositionScores {
 public:
  PositionScores(const Arithmetic& arithmetic, const hfca::Attention& a, const hfca::AttentionTask& task, Carver& memory)
      : arithmetic_(arithmetic), positions_(a.positions), task_(task) {
    if (!positions_) return;
    line_ = round_up(key_block + Arithmetic::rows_at_once, chunk) + 2 * chunk;
    keys_rows_ = task.row_end - task.row_begin + chunk + 2 * Arithmetic::rows_at_once;
    product_ = memory.take(Arithmetic::rows_at_once * line_);
    lines_ = memory.take(Arithmetic::rows_at_once * line_);
    of_keys_ = memory.take(key_block * keys_rows_);
  }

  // The products of keys [begin, end), which the arithmetic has taken, for all rows of the task.
  void take_keys(int64_t begin, int64_t end) const {
    if (!positions_ || !positions_->query.data) return;
    const PackedPositions<Arithmetic> packed = operands();
    for (int64_t k = begin; k < end; k += chunk) {
      float* const to = of_keys_ + (k - begin) * keys_rows_;
      const int64_t first = first_row(k), behind = row_of(task_.row_end - 1, k) + 1;
      for (int64_t r = first; r < behind; r += Arithmetic::rows_at_once)
        arithmetic_.score(packed.queries.from(r), packed.height_of(*positions_, r), arithmetic_.keys().from(k - begin), chunk,
                          to + (r - first) * chunk);
      shear(to, behind - first);
    }
  }

  // To the scores of rows [row, row + rows) for keys [begin, begin + keys).
  void add_to(float* scores, int64_t row, int rows, int64_t begin, int64_t keys) const {
    if (!positions_ || keys == 0) return;
    const int64_t distance = static_cast<int64_t>(rows) * chunk;
    if (positions_->key.data) {
      const int64_t origin = multiply_queries(row, rows, begin, keys);
      for (int i = 0; i < rows; ++i) {
        const float* const line = lines_ + i * line_ + origin - i;
        add_each(scores + i * chunk, distance, keys, [&](int64_t k) { return line + k; });
      }
    }
    if (!positions_->query.data) return;
    for (int i = 0; i < rows; ++i)
      add_each(scores + i * chunk, distance, keys, [&](int64_t k) {
        const int64_t in_chunk = k % chunk, first_key = begin + k - in_chunk, r = row_of(row + i, first_key) - first_row(first_key);
        return of_keys_ + (k - in_chunk) * keys_rows_ + (r - in_chunk) * chunk + in_chunk;
      });
  }

 private:
  PackedPositions<Arithmetic> operands() const {
    Carver memory{positions_->packed + task_.kv_head * positions_->packed_floats};
    return PackedPositions<Arithmetic>(arithmetic_, *positions_, memory);
  }

  // The row of packed queries that a query and a key meet at, and the first of the tiles for 32 keys from `key` on.
  int64_t row_of(int64_t query, int64_t key) const { return query - key + positions_->length - 1 + chunk; }
  int64_t first_row(int64_t key) const {
    return row_of(task_.row_begin, key + chunk - 1) / Arithmetic::rows_at_once * Arithmetic::rows_at_once;
  }

  // Lines of products with the positions between these queries and keys; returns where in the first of them that of the first key is.
  int64_t multiply_queries(int64_t row, int rows, int64_t begin, int64_t keys) const {
    const int64_t origin = begin - row + positions_->length - 1, first = (origin - rows + 1) / chunk * chunk,
                  columns = origin + keys - first;
    arithmetic_.score(arithmetic_.queries_of(row), rows, operands().keys.from(first), columns, product_);
    for (int64_t c = 0; c < columns; c += chunk)
      for (int i = 0; i < rows; ++i) {
        const float* const from = product_ + (c * rows + i * chunk);
        float* const to = lines_ + i * line_ + c;
        unroll<0, chunk / Simd::width>([&](auto v) HFCA_INLINE { Simd::store(to + v * Simd::width, Simd::load(from + v * Simd::width)); });
      }
    return origin - first;
  }

  // values[row][key] becomes values[row - key % width][key], for 32 keys: lanes move by one, two, four, ... rows.
  static void shear(float* values, int64_t rows) {
    const Float one = Simd::set1(1.0f);
    for (int step = 1; step < Simd::width; step *= 2) {
      alignas(64) float moves[Simd::width];
      for (int i = 0; i < Simd::width; ++i) moves[i] = (i & step) != 0 ? 1.0f : 0.0f;
      const Float moved = Simd::load(moves);
      for (int64_t r = rows - 1; r >= step; --r) {
        float* const to = values + r * chunk;
        unroll<0, chunk / Simd::width>([&](auto v) HFCA_INLINE {
          float* const x = to + v * Simd::width;
          Simd::store(x, Simd::where_equal(moved, one, Simd::load(x - step * chunk), Simd::load(x)));
        });
      }
    }
  }

  template <class From>
  static void add_each(float* scores, int64_t distance, int64_t keys, const From& from) {
    for (int64_t k = 0; k < keys; k += Simd::width) {
      float* const to = scores + k / chunk * distance + k % chunk;
      Simd::store(to, Simd::add(Simd::load(to), Simd::load(from(k))));
    }
  }

  const Arithmetic& arithmetic_;
  const hfca::RelativePositions* positions_;
  const hfca::AttentionTask& task_;
  int64_t line_ = 0, keys_rows_ = 0;
  float *product_ = nullptr, *lines_ = nullptr, *of_keys_ = nullptr;
};

// Nothing is packed for few rows, and those with positions do not come here.
template <>
class PositionScores<FewRows> {
 public:
  PositionScores(const FewRows&, const hfca::Attention&, const hfca::AttentionTask&, Carver&) {}
  void take_keys(int64_t, int64_t) const {}
  void add_to(float*, int64_t, int, int64_t, int64_t) const {}
};

template <class Arithmetic>
inline void pack_positions_as(const hfca::Attention& a, int64_t head) {
  const hfca::AttentionTask task{0, head, 0, 1, 0, 0};
  Carver none{nullptr}, memory{a.positions->packed + head * a.positions->packed_floats};
  const Arithmetic arithmetic(a, task, none);
  PackedPositions<Arithmetic>(arithmetic, *a.positions, memory).pack(arithmetic, *a.positions, head);
}

template <class Arithmetic>
inline int64_t position_floats_as(const hfca::Attention& a) {
  const hfca::AttentionTask task{0, 0, 0, 1, 0, 0};
  Carver none{nullptr}, counter{nullptr};
  PackedPositions<Arithmetic>(Arithmetic(a, task, none), *a.positions, counter);
  return counter.floats;
}

template <>
inline void pack_positions_as<FewRows>(const hfca::Attention&, int64_t) {}
template <>
inline int64_t position_floats_as<FewRows>(const hfca::Attention&) {
  return 0;
}

}  // namespace HFCA_TIER
