// The two steps of a GEMM, input packing and multiplication, spread over the threads of a team.
#pragma once
#include <algorithm>

#include "../dispatch.h"
#include "../team.h"
#include "../workspace.h"
#include "grid.h"

namespace hfca {

// Memory that a GEMM needs while it runs: the packed input and, for int8, what its rows were quantized with. It belongs to the team, whose
// threads pack the input together and meet before they multiply, or, `own`, to one of its threads: where there are so few rows that one
// of them would pack them while the others wait, each packs all for itself.
struct GemmMemory {
  uint32_t* words;
  float *scale, *zero;
  bool own = false;

  static size_t size_of(int64_t rows, int64_t input_words) {
    return Workspace::size_of<uint32_t>(rows * input_words) + 2 * Workspace::size_of<float>(rows);
  }
  GemmMemory(Workspace& workspace, int64_t rows, int64_t input_words)
      : words(workspace.take<uint32_t>(rows * input_words)), scale(workspace.take<float>(rows)), zero(workspace.take<float>(rows)) {}
};

// int4 weights are read as they are by few rows; for many each panel is unpacked once. AMX tiles are for many rows, too.
inline const GemmKernels& kernels_of(WeightKind kind, int64_t rows) {
  const Kernels& all = dispatch().kernels;
  const GemmKernels& kernels = all.gemm[static_cast<int>(kind)];
  return rows <= kernels.most_rows ? kernels : all.gemm_of_many_rows[static_cast<int>(kind)];
}
inline const GemmKernels& kernels_of(const Gemm& g) { return kernels_of(g.kind, g.m); }
inline int64_t input_words(const Gemm& g) { return kernels_of(g).input_words(g); }
// However many of its rows are multiplied together.
inline int64_t most_input_words(const Gemm& g) {
  return std::max(kernels_of(g.kind, 1).input_words(g), kernels_of(g.kind, INT64_MAX).input_words(g));
}
inline double multiply_adds(const Gemm& g) { return static_cast<double>(g.m) * static_cast<double>(g.n) * static_cast<double>(g.k); }

// A thread's part of a GEMM, from its first product to the last.
class Computing {
 public:
  explicit Computing(const GemmKernels& kernels) : leave_(kernels.leave) {
    if (kernels.enter) kernels.enter();
  }
  ~Computing() {
    if (leave_) leave_();
  }
  Computing(const Computing&) = delete;
  Computing& operator=(const Computing&) = delete;

 private:
  void (*leave_)();
};

// Memory of one thread for its units: what takes sums from one part of k to the next, or a part of an unpacked panel.
struct UnitMemory {
  float* sums = nullptr;
  void* unpacked = nullptr;
};

// Work units [begin, end) of the order (block, panel, tile), panels group by group, and these part of k by part. While one piece of the
// weights is multiplied by the tiles of a block, each tile asks for its share of the next piece: weights come from memory at the
// arithmetic's pace instead of stopping it at each new panel.
class Units {
 public:
  Units(const GemmKernels& kernels, const Gemm& g, const GemmGrid& grid, const UnitMemory& memory)
      : kernels_(kernels), g_(g), grid_(grid), memory_(memory), panel_bytes_(kernels.panel_bytes(g)), sides_(g.gated ? 2 : 1) {}

  void run(int64_t begin, int64_t end) {
    const Computing computing(kernels_);
    for (int64_t block = 0, base = 0; block < grid_.blocks; ++block) {
      first_ = grid_.block_tile(block), height_ = grid_.block_tile(block + 1) - first_, rows_ = grid_.block_rows(block);
      const int64_t units = height_ * grid_.panels;
      from_ = std::max(begin - base, int64_t{0}), to_ = std::min(end - base, units);  // of this block
      base += units;
      if (from_ >= to_) continue;
      const int64_t panels = (to_ + height_ - 1) / height_;
      for (int64_t panel = from_ / height_; panel < panels; panel += grid_.group) {
        begin_panel_ = panel, end_panel_ = std::min(panel + grid_.group, panels), more_ = end_panel_ < panels;
        run_group();
      }
    }
  }

 private:
  void run_group() const {
    for (int64_t part = 0; part < grid_.parts; ++part)
      for (int64_t panel = begin_panel_; panel < end_panel_; ++panel)
        for (int64_t side = 0; side < sides_; ++side) run_piece(part, panel, side);
  }

  // Where a part of a panel begins; of weights that are yet to be unpacked, roughly.
  int64_t offset(int64_t part) const {
    if (part == 0) return 0;
    if (part == grid_.parts) return panel_bytes_;
    const int64_t words = part * grid_.part_words;
    return kernels_.unpack ? panel_bytes_ * words / g_.input_words : words * kernels_.word_bytes;
  }

  void run_piece(int64_t part, int64_t panel, int64_t side) const {
    const int64_t p = panel + side * grid_.panels, begin = part * grid_.part_words, end = begin + grid_.part_words;
    const char* const start = static_cast<const char*>(g_.weight) + p * panel_bytes_;
    const void* weight = start + offset(part);
    if (memory_.unpacked) kernels_.unpack(g_, start, begin, end, memory_.unpacked), weight = memory_.unpacked;
    // The next piece of this side: of the group's next panel, of its first one, of the next group.
    const bool again = panel + 1 == end_panel_, done = again && part + 1 == grid_.parts;
    const int64_t next_part = !again ? part : done ? 0 : part + 1, next_panel = !again || done ? panel + 1 : begin_panel_;
    const char* const next = start + (next_panel - panel) * panel_bytes_ + offset(next_part);
    const int64_t bytes = offset(next_part + 1) - offset(next_part);
    const int64_t mine = kernels_.unpack ? grid_.part_words : (offset(part + 1) - offset(part)) / (4 * panel_columns);
    const int64_t words = std::max(mine, int64_t{1});
    const int64_t share = (bytes / height_ + 63) / 64 * 64, step = (share + words - 1) / words;
    const int64_t kept = ((panel - begin_panel_) * sides_ + side) * rows_ - grid_.tile_row(first_);  // rows before
    const int64_t first = std::max(from_ - panel * height_, int64_t{0}), last = std::min(to_ - panel * height_, height_);
    int64_t row = grid_.tile_row(first_ + first);
    for (int64_t tile = first; tile < last; ++tile) {
      const int64_t next_row = grid_.tile_row(first_ + tile + 1);
      // A single tile reads its weights once, at the memory's pace: ask for those further on, panels lie in a row.
      const Ahead ahead = height_ == 1 && !memory_.unpacked ? Ahead{static_cast<const char*>(weight) + far_bytes, 4 * panel_columns}
                          : !done || more_                  ? Ahead{next + tile * share, step}
                                                            : Ahead{start, 0};
      float* const sums = memory_.sums ? memory_.sums + (kept + row) * kernels_.row_lines * panel_columns : nullptr;
      kernels_.compute(g_, row, static_cast<int>(next_row - row), p, weight, ahead, {begin, end, sums, part + 1 == grid_.parts});
      row = next_row;
    }
  }

  const GemmKernels& kernels_;
  const Gemm& g_;
  const GemmGrid& grid_;
  UnitMemory memory_;
  int64_t panel_bytes_, sides_;
  int64_t first_ = 0, height_ = 0, rows_ = 0;              // of the block: its first tile, its tiles, its rows
  int64_t from_ = 0, to_ = 0;                              // units of the block
  int64_t begin_panel_ = 0, end_panel_ = 0;                // of the group
  bool more_ = false;                                      // groups follow
};

// The same with memory of its own.
inline void run_units(const GemmKernels& kernels, const Gemm& g, const GemmGrid& grid, int64_t begin, int64_t end) {
  if (!kernels.unpack && grid.parts == 1) return Units(kernels, g, grid, {}).run(begin, end);
  const int64_t sums = grid.parts > 1 ? grid.most_sums(end - begin, g.gated ? 2 : 1) * kernels.row_lines * panel_columns : 0,
                unpacked = kernels.unpack ? grid.part_words * panel_columns * 4 : 0;
  Workspace workspace(Workspace::size_of<float>(sums) + Workspace::size_of<char>(unpacked));
  const UnitMemory memory{grid.parts > 1 ? workspace.take<float>(sums) : nullptr,
                          kernels.unpack ? workspace.take<char>(unpacked) : nullptr};
  Units(kernels, g, grid, memory).run(begin, end);
}

// Ask for the first weights that this thread is to multiply few rows by. (A step of SmolLM2-135M in int4 on Zen 4: 0.96 of the time with 4 KB
// of them, 1.00 with 16 KB.)
inline void ask_for(const Team& team, const Gemm& g) {
  constexpr int64_t most_bytes = 4096;
  const GemmKernels& kernels = kernels_of(g);
  const int64_t sides = g.gated ? 2 : 1, panels = (g.n + panel_columns - 1) / panel_columns / sides, bytes = kernels.panel_bytes(g);
  team.share(panels, [&](int64_t begin, int64_t end) {
    const int64_t most = std::min((end - begin) * bytes, most_bytes / sides);
    for (int64_t side = 0; side < sides; ++side) {
      const char* const first = static_cast<const char*>(g.weight) + (begin + side * panels) * bytes;
      for (int64_t i = 0; i < most; i += 64) __builtin_prefetch(first + i, 0, 2);
    }
  });
}

// g over the team. prepare(first row, rows) is called for each tile of input rows before it is packed, by the thread that packs it:
// what makes the input row by row (a norm) leaves it in that thread's cache.
//
// Units are dealt out in contiguous, equal runs: the split follows N when M is small and M when it is large, without a special case.
template <class Prepare>
void run_gemm(const Team& team, const Gemm& problem, const GemmMemory& memory, const Prepare& prepare) {
  if (problem.m == 0 || problem.n == 0) return;
  // Each thread works on its own copy of the problem: the original may lie on another thread's stack, whose cache lines that thread
  // keeps writing to. Reading it from there cost a factor of 2 to 10, depending on where the stack happened to lie.
  Gemm g = problem;
  g.words = memory.words, g.input_scale = memory.scale, g.input_zero = memory.zero;
  g.input_words = input_words(g);
  const GemmKernels kernels = kernels_of(g);
  const GemmGrid grid(g, kernels);
  const auto pack = [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      prepare(grid.tile_row(t), grid.tile_height(t));
      kernels.pack_rows(g, grid.tile_row(t), grid.tile_height(t));
    }
  };
  memory.own ? pack(0, grid.tiles) : team.each(grid.tiles, pack);
  const auto multiply = [&](int64_t begin, int64_t end) { run_units(kernels, g, grid, begin, end); };
  if (!problem.following) return team.each(grid.tiles * grid.panels, multiply);
  team.each(grid.tiles * grid.panels, multiply, [&] { ask_for(team, *problem.following); });
}

inline void run_gemm(const Team& team, const Gemm& g, const GemmMemory& memory) {
  run_gemm(team, g, memory, [](int64_t, int) {});
}

}  // namespace hfca
