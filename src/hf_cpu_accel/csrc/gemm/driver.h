// The two steps of a GEMM, input packing and multiplication, spread over the threads of a team.
#pragma once
#include <algorithm>

#include "../cache.h"
#include "../dispatch.h"
#include "../team.h"
#include "../workspace.h"

namespace hfca {

// Memory that a GEMM needs while it runs: the packed input and, for int8, what its rows were quantised with. It belongs to the team, whose
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

// The shape of the work: rows in tiles of nearly equal height (no short last tile) in the kernels' units, tiles in blocks whose packed
// input stays in L2 while the weight panels pass by. Where k is long, blocks of some height are had by multiplying a part of k at a time.
struct GemmGrid {
  int64_t m, unit, units;            // of rows
  int64_t tiles, panels, blocks;  // gated: a panel of the gate and the one that it is multiplied by count as one
  int64_t part_words, parts;

  GemmGrid(const Gemm& g, const GemmKernels& kernels)
      : m(g.m),
        unit(kernels.row_unit),
        units((g.m + unit - 1) / unit),
        tiles((g.m + kernels.tile_rows - 1) / kernels.tile_rows),
        panels((g.n + panel_columns - 1) / panel_columns / (g.gated ? 2 : 1)) {
    // Every block reads all weights. With fewer rows than these, memory would be the limit.
    constexpr int64_t least_tiles = 3, wanted_rows = 128, line = 16;  // parts are whole lines of packed input
    const int64_t room = level2_bytes() * 5 / 16 / 4;
    const auto in_block = [&](int64_t words) { return std::max(room / (words * kernels.tile_rows + 1), int64_t{1}); };
    const bool divided = kernels.word_bytes > 0 && in_block(g.input_words) < std::min(tiles, least_tiles);
    parts = divided ? (g.input_words * std::min(m, wanted_rows) + room - 1) / room : 1;
    part_words = ((g.input_words + parts - 1) / parts + line - 1) / line * line;
    blocks = (tiles + in_block(part_words) - 1) / in_block(part_words);
  }

  int64_t tile_row(int64_t tile) const { return std::min(tile * units / tiles * unit, m); }
  int tile_height(int64_t tile) const { return static_cast<int>(tile_row(tile + 1) - tile_row(tile)); }
  int64_t block_tile(int64_t block) const { return block * tiles / blocks; }
  int64_t block_rows(int64_t block) const { return tile_row(block_tile(block + 1)) - tile_row(block_tile(block)); }

  // Sums that a thread with so many units keeps between parts: those of all panels that it meets in a block.
  int64_t most_sums(int64_t units, int64_t sides) const {
    int64_t most = 0;
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t met = std::min(units / (block_tile(block + 1) - block_tile(block)) + 2, panels);
      most = std::max(most, met * sides * block_rows(block) * panel_columns);
    }
    return most;
  }
};

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

// Memory of one thread for its units: what takes sums from one part of k to the next, or an unpacked panel.
struct UnitMemory {
  float* sums = nullptr;
  void* unpacked = nullptr;
};

// Work units [begin, end) of the order (block, panel, tile), part of k by part. While one panel is multiplied by the tiles of a block, each
// tile asks for its share of the next panel: weights come from memory at the arithmetic's pace instead of stopping it at each new panel.
inline void run_units(const GemmKernels& kernels, const Gemm& g, const GemmGrid& grid, int64_t begin, int64_t end,
                      const UnitMemory& memory) {
  const int64_t panel_bytes = kernels.panel_bytes(g), sides = g.gated ? 2 : 1;
  const Computing computing(kernels);
  for (int64_t block = 0, base = 0; block < grid.blocks; ++block) {
    const int64_t first = grid.block_tile(block), height = grid.block_tile(block + 1) - first, units = height * grid.panels;
    const int64_t from = std::max(begin - base, int64_t{0}), to = std::min(end - base, units);  // of this block
    for (int64_t k = 0; from < to && k < grid.parts; ++k) {
      const bool last = k + 1 == grid.parts;
      const int64_t offset = k * grid.part_words * kernels.word_bytes,
                    bytes = last ? panel_bytes - offset : grid.part_words * kernels.word_bytes;
      const int64_t words = (memory.unpacked ? kernels.unpacked_bytes(g) : bytes) / (4 * panel_columns);
      const int64_t share = (bytes / height + 63) / 64 * 64, step = words > 0 ? (share + words - 1) / words : 0;
      for (int64_t unit = from; unit < to;) {
        const int64_t panel = unit / height, stop = std::min((panel + 1) * height, to);
        const bool more = panel + 1 < grid.panels && stop < to;
        for (int64_t side = 0; side < sides; ++side) {
          const int64_t p = panel + side * grid.panels;
          const char* const mine = static_cast<const char*>(g.weight) + p * panel_bytes + offset;
          const int64_t kept = ((panel - from / height) * sides + side) * grid.block_rows(block) - grid.tile_row(first);  // rows before
          if (memory.unpacked) kernels.unpack(g, mine, memory.unpacked);
          for (int64_t u = unit; u < stop; ++u) {
            const int64_t tile = u - panel * height, t = first + tile, row = grid.tile_row(t);
            // A single tile reads its weights once, at the memory's pace: ask for those further on, panels lie in a row.
            const Ahead ahead = height == 1 && !memory.unpacked ? Ahead{mine + far_bytes, 4 * panel_columns}
                                : more                          ? Ahead{mine + panel_bytes + tile * share, step}
                                                                : Ahead{mine, 0};
            float* const sums = memory.sums ? memory.sums + (kept + row) * panel_columns : nullptr;
            kernels.compute(g, row, grid.tile_height(t), p, memory.unpacked ? memory.unpacked : mine, ahead,
                            {k * grid.part_words, (k + 1) * grid.part_words, sums, last});
          }
        }
        unit = stop;
      }
    }
    base += units;
  }
}

// The same with memory of its own.
inline void run_units(const GemmKernels& kernels, const Gemm& g, const GemmGrid& grid, int64_t begin, int64_t end) {
  if (!kernels.unpack && grid.parts == 1) return run_units(kernels, g, grid, begin, end, {});
  const int64_t sums = grid.parts > 1 ? grid.most_sums(end - begin, g.gated ? 2 : 1) : 0,
                unpacked = kernels.unpack ? kernels.unpacked_bytes(g) : 0;
  Workspace workspace(Workspace::size_of<float>(sums) + Workspace::size_of<char>(unpacked));
  run_units(kernels, g, grid, begin, end,
            {grid.parts > 1 ? workspace.take<float>(sums) : nullptr, kernels.unpack ? workspace.take<char>(unpacked) : nullptr});
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
  team.each(grid.tiles * grid.panels, [&](int64_t begin, int64_t end) { run_units(kernels, g, grid, begin, end); });
}

inline void run_gemm(const Team& team, const Gemm& g, const GemmMemory& memory) {
  run_gemm(team, g, memory, [](int64_t, int) {});
}

}  // namespace hfca
