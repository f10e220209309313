// A stable counting sort of edges by their row, spread over a team: coordinates to compressed sparse rows, or a CSR to its transpose.
//
// Each piece of the edges is counted on its own, and the counts of the pieces before tell where its edges of a row go: the order within a
// row is that of the edges, whatever the number of threads.
#pragma once
#include <cstdint>
#include <cstring>

#include "../team.h"
#include "../workspace.h"

namespace hfca {

// Entry e of the sort: row(e) is its key, col(e) what is sorted. A negative key, or a col, outside of the matrix is an error; entries for
// which skip(e) holds are left out.
struct CsrOutput {
  int32_t *rowptr, *col, *order;  // [rows + 1], [capacity], [capacity]; order may be null: where each entry came from
  int64_t capacity;               // at least the edges and the loops
};

// After the entries, one loop (i, i) for each i < loops is appended to its row; its order is edges + i. Returns false where an index is
// out of range.
template <class Row, class Col, class Skip>
bool counting_sort(Team& team, int64_t pieces, int64_t edges, int64_t rows, int64_t cols, int64_t loops, const Row& row, const Col& col,
                   const Skip& skip, int32_t* counts, std::atomic<bool>& valid, const CsrOutput& out) {
  const auto begin_of = [=](int64_t piece) { return piece * edges / pieces; };
  team.each(pieces, [&](int64_t first, int64_t last) {
    for (int64_t piece = first; piece < last; ++piece) {
      int32_t* count = counts + piece * rows;
      std::memset(count, 0, static_cast<size_t>(rows) * sizeof(int32_t));
      bool inside = true;
      for (int64_t e = begin_of(piece); e < begin_of(piece + 1); ++e) {
        const int64_t r = row(e), c = col(e);
        const bool here = r >= 0 && r < rows && c >= 0 && c < cols;
        inside &= here;
        if (here && !skip(r, c)) ++count[r];
      }
      if (!inside) valid.store(false, std::memory_order_relaxed);
    }
  });
  if (!valid.load(std::memory_order_relaxed)) return false;
  team.each(1, [&](int64_t, int64_t) {
    int32_t total = 0;
    for (int64_t r = 0; r < rows; ++r) {
      out.rowptr[r] = total;
      for (int64_t piece = 0; piece < pieces; ++piece) {
        int32_t& count = counts[piece * rows + r];
        const int32_t before = total;
        total += count;
        count = before;
      }
      if (r < loops) {
        out.col[total] = static_cast<int32_t>(r);
        if (out.order) out.order[total] = static_cast<int32_t>(edges + r);
        ++total;
      }
    }
    out.rowptr[rows] = total;
    for (int64_t e = total; e < out.capacity; ++e) {  // left out: nobody reads them, but they are the caller's
      out.col[e] = 0;
      if (out.order) out.order[e] = 0;
    }
  });
  team.each(pieces, [&](int64_t first, int64_t last) {
    for (int64_t piece = first; piece < last; ++piece) {
      int32_t* next = counts + piece * rows;
      for (int64_t e = begin_of(piece); e < begin_of(piece + 1); ++e) {
        const int64_t r = row(e), c = col(e);
        if (skip(r, c)) continue;
        const int32_t at = next[r]++;
        out.col[at] = static_cast<int32_t>(c);
        if (out.order) out.order[at] = static_cast<int32_t>(e);
      }
    }
  });
  return true;
}

// Pieces that a sort is divided into: their counts should not be more work than the edges.
inline int64_t sort_pieces(int64_t threads, int64_t edges, int64_t rows) {
  const int64_t most = edges / (rows / 2 + 1024);
  return threads < most ? threads : most < 1 ? 1 : most;
}

}  // namespace hfca
