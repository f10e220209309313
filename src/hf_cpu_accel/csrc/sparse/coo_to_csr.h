// A stable sort of edges by their row, spread over a team: coordinates to compressed sparse rows, or a CSR to its transpose.
//
// Edges are dealt into buckets of neighboring rows first, and counted out within each bucket then. Counting out at once would write to a
// random place for each edge, which is a cache miss each; here the places of a bucket are in L2, and dealing writes as many streams as there
// are buckets. The order within a row is that of the edges, whatever the number of threads: each piece of the edges writes its share of
// a bucket behind those of the pieces before.
#pragma once
#include <cstdint>
#include <cstring>

#include "../team.h"
#include "../workspace.h"

namespace hfca {

struct CsrOutput {
  int32_t *rowptr, *col, *order;  // [rows + 1], [capacity], [capacity]; order may be null: where each entry came from
  int64_t capacity;  // at least the edges and the loops
};

class EdgeSort {
 public:
  EdgeSort(int64_t edges, int64_t rows, int64_t threads) : edges_(edges), rows_(rows) {
    while ((rows_ >> shift_) >= buckets_for(edges)) ++shift_;
    buckets_ = (rows_ >> shift_) + 1;
    pieces_ = buckets_ == 1 ? 1 : threads;
  }

  int64_t threads() const { return pieces_; }
  size_t workspace_size() const {
    return Workspace::size_of<Entry>(edges_) + Workspace::size_of<int32_t>(pieces_ * buckets_) + Workspace::size_of<int32_t>(buckets_ + 1) +
           Workspace::size_of<int32_t>(pieces_ << shift_);
  }
  void take(Workspace& workspace) {
    dealt_ = workspace.take<Entry>(edges_);
    next_ = workspace.take<int32_t>(pieces_ * buckets_);
    begin_ = workspace.take<int32_t>(buckets_ + 1);
    counts_ = workspace.take<int32_t>(pieces_ << shift_);
  }

  // each(begin, end, f) calls f(e, row, col) for edges [begin, end) in order; those for which skip(row, col) holds are left out. After the
  // edges, one loop (i, i) for each i < loops is appended to its row; its order is edges + i. `valid` turns false where a row or col is
  // negative or not below `rows` or `cols`.
  template <class Each, class Skip>
  void run(Team& team, int64_t cols, int64_t loops, const Each& each, const Skip& skip, std::atomic<bool>& valid,
           const CsrOutput& out) const {
    team.each(pieces_, [&](int64_t first, int64_t last) {
      for (int64_t piece = first; piece < last; ++piece) {
        int32_t* next = next_ + piece * buckets_;
        std::memset(next, 0, static_cast<size_t>(buckets_) * sizeof(int32_t));
        bool inside = true;
        const int64_t rows = rows_;
        const int shift = shift_;
        each(begin_of(piece), begin_of(piece + 1), [&, next](int64_t, int64_t row, int64_t col) {
          const bool here = row >= 0 && row < rows;
          inside &= here;
          if (here && !skip(row, col)) ++next[row >> shift];
        });
        if (!inside) valid.store(false, std::memory_order_relaxed);
      }
    });
    if (!valid.load(std::memory_order_relaxed)) return;
    team.each(1, [&](int64_t, int64_t) {
      int32_t total = 0;
      for (int64_t bucket = 0; bucket < buckets_; ++bucket) {
        begin_[bucket] = total;
        for (int64_t piece = 0; piece < pieces_; ++piece) {
          const int32_t before = total;
          total += next_[piece * buckets_ + bucket];
          next_[piece * buckets_ + bucket] = before;
        }
      }
      begin_[buckets_] = total;
    });
    team.each(pieces_, [&](int64_t first, int64_t last) {
      for (int64_t piece = first; piece < last; ++piece) {
        int32_t* next = next_ + piece * buckets_;
        Entry* dealt = dealt_;
        const int shift = shift_;
        bool inside = true;
        each(begin_of(piece), begin_of(piece + 1), [&, next, dealt](int64_t e, int64_t row, int64_t col) {
          inside &= col >= 0 && col < cols;
          if (skip(row, col)) return;
          Entry* entry = dealt + next[row >> shift]++;
          *entry = {static_cast<int32_t>(row), static_cast<int32_t>(col), static_cast<int32_t>(e)};
          __builtin_prefetch(entry + entries_ahead, 1);
        });
        if (!inside) valid.store(false, std::memory_order_relaxed);
      }
    });
    if (!valid.load(std::memory_order_relaxed)) return;
    team.claim(buckets_, [&](int64_t bucket) { count_out(bucket, loops, counts_ + (static_cast<int64_t>(team.slot()) << shift_), out); });
    team.each(1, [&](int64_t, int64_t) {
      const int32_t total = begin_[buckets_] + static_cast<int32_t>(loops);
      out.rowptr[rows_] = total;
      for (int64_t e = total; e < out.capacity; ++e) {  // left out: they are not read, but they are the caller's
        out.col[e] = 0;
        if (out.order) out.order[e] = 0;
      }
    });
  }

 private:
  struct Entry {
    int32_t row, col, order;
  };
  // The hardware follows some 32 streams of writes; of more, each new line would be waited for.
  static constexpr int64_t entries_ahead = 16;

  // Few enough that the lines under way to them stay in L1, and as many edges in each as make it worth a bucket.
  static int64_t buckets_for(int64_t edges) { return edges / 8192 < 1 ? 1 : edges / 8192 > 512 ? 512 : edges / 8192; }

  int64_t begin_of(int64_t piece) const { return piece * edges_ / pieces_; }

  void count_out(int64_t bucket, int64_t loops, int32_t* counts, const CsrOutput& out) const {
    const int64_t first_row = bucket << shift_, end = (bucket + 1) << shift_, last_row = end < rows_ ? end : rows_;
    std::memset(counts, 0, static_cast<size_t>(last_row - first_row) * sizeof(int32_t));
    for (int32_t i = begin_[bucket]; i < begin_[bucket + 1]; ++i) ++counts[dealt_[i].row - first_row];
    const int64_t first = begin_[bucket] + (first_row < loops ? first_row : loops);
    int64_t total = first;
    for (int64_t row = first_row; row < last_row; ++row) {
      const int64_t count = counts[row - first_row];
      out.rowptr[row] = counts[row - first_row] = static_cast<int32_t>(total);
      total += count;
      if (row < loops) {
        out.col[total] = static_cast<int32_t>(row);
        if (out.order) out.order[total] = static_cast<int32_t>(edges_ + row);
        ++total;
      }
    }
    const auto ask_for = [](const int32_t* begin, const int32_t* end) {
      for (; begin < end; begin += 16) __builtin_prefetch(begin, 1);
    };
    // Not from rowptr[first_row] on: behind the last row that is not written yet.
    ask_for(out.col + first, out.col + total);
    if (out.order) ask_for(out.order + first, out.order + total);
    for (int32_t i = begin_[bucket]; i < begin_[bucket + 1]; ++i) {
      const Entry& entry = dealt_[i];
      const int32_t at = counts[entry.row - first_row]++;
      out.col[at] = entry.col;
      if (out.order) out.order[at] = entry.order;
    }
  }

  int64_t edges_, rows_, pieces_ = 1, buckets_ = 1;
  int shift_ = 0;
  Entry* dealt_ = nullptr;
  int32_t *next_ = nullptr, *begin_ = nullptr, *counts_ = nullptr;
};

}  // namespace hfca
