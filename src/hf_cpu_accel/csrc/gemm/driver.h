// The two steps of a GEMM, input packing and multiplication, spread over the threads of a team.
#pragma once
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

// int4 weights are read as they are by few rows; for many each panel is unpacked once.
inline const GemmKernels& kernels_of(WeightKind kind, int64_t rows) {
  const Dispatch& d = dispatch();
  const GemmKernels& kernels = d.gemm[static_cast<int>(kind)];
  return kind == WeightKind::int4 && rows > kernels.tile_rows ? d.gemm_int4_unpacked : kernels;
}
inline const GemmKernels& kernels_of(const Gemm& g) { return kernels_of(g.kind, g.m); }
inline int64_t input_words(const Gemm& g) { return kernels_of(g).input_words(g); }
inline double multiply_adds(const Gemm& g) { return static_cast<double>(g.m) * static_cast<double>(g.n) * static_cast<double>(g.k); }

// The shape of the work: rows in tiles of nearly equal height (no short last tile), tiles in blocks whose packed input stays in L2
// while the weight panels pass by.
struct GemmGrid {
  int64_t m, tiles, panels, blocks;  // gated: a panel of the gate and the one that it is multiplied by count as one

  GemmGrid(const Gemm& g, const GemmKernels& kernels)
      : m(g.m), tiles((g.m + kernels.tile_rows - 1) / kernels.tile_rows), panels((g.n + panel_columns - 1) / panel_columns / (g.gated ? 2 : 1)) {
    const int64_t tile_bytes = 4 * (g.input_words * kernels.tile_rows + 1), in_block = level2_bytes() * 5 / 16 / tile_bytes;
    blocks = in_block > 1 ? (tiles + in_block - 1) / in_block : tiles;
  }

  int64_t tile_row(int64_t tile) const { return tile * m / tiles; }
  int tile_height(int64_t tile) const { return static_cast<int>(tile_row(tile + 1) - tile_row(tile)); }
  int64_t block_tile(int64_t block) const { return block * tiles / blocks; }
};

// Work units [begin, end) of the order (block, panel, tile). While one panel is multiplied by the tiles of a block, each tile asks
// for its share of the next panel: weights come from memory at the arithmetic's pace instead of stopping it at each new panel.
// unpacked: memory for one panel where kernels unpack them, else null.
inline void run_units(const GemmKernels& kernels, const Gemm& g, const GemmGrid& grid, int64_t begin, int64_t end, void* unpacked) {
  constexpr int64_t near_bytes = 8192;
  const int64_t panel_bytes = kernels.panel_bytes(g), words = (unpacked ? kernels.unpacked_bytes(g) : panel_bytes) / (4 * panel_columns);
  int64_t unit = begin;
  for (int64_t block = 0; block < grid.blocks && unit < end; ++block) {
    const int64_t first = grid.block_tile(block), height = grid.block_tile(block + 1) - first, base = first * grid.panels;
    const int64_t share = (panel_bytes / height + 63) / 64 * 64;
    const int64_t step = words > 0 ? (share + words - 1) / words : 0;
    while (unit < end && unit < base + height * grid.panels) {
      const int64_t panel = (unit - base) / height, next = base + (panel + 1) * height, stop = next < end ? next : end;
      const bool more = panel + 1 < grid.panels && next < end;
      for (int64_t p = panel; p < (g.gated ? 2 : 1) * grid.panels; p += grid.panels) {
        const char* const mine = static_cast<const char*>(g.weight) + p * panel_bytes;
        if (unpacked) kernels.unpack(g, mine, unpacked);
        for (int64_t u = unit; u < stop; ++u) {
          const int64_t tile = u - base - panel * height, t = first + tile;
          // A single tile reads its weights once, at the memory's pace: ask for those a few KB ahead, panels lie in a row.
          const Ahead ahead = height == 1 && !unpacked ? Ahead{mine + near_bytes, 4 * panel_columns}
                              : more                   ? Ahead{mine + panel_bytes + tile * share, step}
                                                       : Ahead{mine, 0};
          kernels.compute(g, grid.tile_row(t), grid.tile_height(t), p, unpacked ? unpacked : mine, ahead);
        }
      }
      unit = stop;
    }
  }
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
  team.each(grid.tiles * grid.panels, [&](int64_t begin, int64_t end) {
    if (!kernels.unpack) return run_units(kernels, g, grid, begin, end, nullptr);
    Workspace workspace(Workspace::size_of<char>(kernels.unpacked_bytes(g)));
    run_units(kernels, g, grid, begin, end, workspace.take<char>(kernels.unpacked_bytes(g)));
  });
}

inline void run_gemm(const Team& team, const Gemm& g, const GemmMemory& memory) {
  run_gemm(team, g, memory, [](int64_t, int) {});
}

}  // namespace hfca
