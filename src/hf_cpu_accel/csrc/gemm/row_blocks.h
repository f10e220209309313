// Many rows through a chain of GEMMs: in blocks, so that what one step makes is still in the cache when the next one reads it.
#pragma once
#include <algorithm>

#include "../cache.h"
#include "../team.h"
#include "gemm.h"

namespace hfca {

// Rows [row, row + rows) of a problem.
inline Gemm rows_of(const Gemm& problem, int64_t row, int64_t rows) {
  const auto from = [row](const Matrix& x) {
    Matrix part = x;
    if (x.index) part.index = x.index + row;
    else if (x.data) part.data = static_cast<char*>(x.data) + row * x.stride * x.element_bytes();
    return part;
  };
  Gemm g = problem;
  g.m = rows;
  g.first_row += row;
  g.input = from(g.input), g.residual = from(g.residual);
  for (Matrix& output : g.outputs) output = from(output);
  return g;
}

// Each thread takes whole blocks of rows from end to end. Where there are too few rows to share out like that, all rows are one block, on
// which the team works together.
//
// 169343 rows of 128 features were packed at 87 MB before the first of them was multiplied; 1280 of them fit the cache.
class RowBlocks {
 public:
  // `words`: of four bytes that a row takes on its way, without its input and output. outputs: features that it becomes. Where there are
  // more rows than these, all weights are less to read than all rows, and threads that keep to their rows need not wait for one another.
  RowBlocks(int64_t m, int64_t words, int64_t threads, int64_t outputs = INT64_MAX) : m_(m) {
    constexpr int64_t least_rows = 128;  // every block reads all weights
    const int64_t room = level2_bytes() * 5 / 16 / 4, rows = std::max(room / std::max(words, int64_t{1}), least_rows);
    const int64_t turns = (m + threads * rows - 1) / (threads * rows);
    apart_ = m >= 2 * threads * rows || (m >= outputs && m >= threads * least_rows);
    count_ = apart_ ? turns * threads : 1;
  }

  int64_t most_rows() const { return (m_ + count_ - 1) / count_; }

  // Sets of scratch memory that are needed.
  int64_t memories(int64_t threads) const { return apart_ ? threads : 1; }

  // f(threads that work on it, number of their scratch memory, first row, rows)
  template <class F>
  void each(const Team& team, const F& f) const {
    if (!apart_) return f(team, 0, 0, m_);
    team.each(count_, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) f(team.alone(), team.slot(), start(block), start(block + 1) - start(block));
    });
  }

 private:
  int64_t start(int64_t block) const { return block * m_ / count_; }

  int64_t m_, count_;
  bool apart_;
};

}  // namespace hfca
