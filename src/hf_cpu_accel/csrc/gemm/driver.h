// The two steps of a GEMM, input packing and multiplication, spread over the threads of a team.
#pragma once
#include "../cache.h"
#include "../dispatch.h"
#include "../team.h"
#include "../workspace.h"

namespace hfca {

// Memory that a GEMM needs while it runs: the packed input and, for int8, what its rows were quantised with.
struct GemmMemory {
  uint32_t* words;
  float *scale, *zero;

  static size_t size_of(int64_t rows, int64_t input_words) {
    return Workspace::size_of<uint32_t>(rows * input_words) + 2 * Workspace::size_of<float>(rows);
  }
  GemmMemory(Workspace& workspace, int64_t rows, int64_t input_words)
      : words(workspace.take<uint32_t>(rows * input_words)), scale(workspace.take<float>(rows)), zero(workspace.take<float>(rows)) {}
};

inline const GemmKernels& kernels_of(const Gemm& g) { return dispatch().gemm[static_cast<int>(g.kind)]; }
inline int64_t input_words(const Gemm& g) { return kernels_of(g).input_words(g.k); }
inline double multiply_adds(const Gemm& g) { return static_cast<double>(g.m) * static_cast<double>(g.n) * static_cast<double>(g.k); }

// The shape of the work: rows in tiles of nearly equal height (no short last tile), tiles in blocks whose packed input stays in L2
// while the weight panels pass by.
struct GemmGrid {
  int64_t m, tiles, panels, blocks;

  GemmGrid(const Gemm& g, const GemmKernels& kernels)
      : m(g.m), tiles((g.m + kernels.tile_rows - 1) / kernels.tile_rows), panels((g.n + panel_columns - 1) / panel_columns) {
    const int64_t tile_bytes = 4 * (g.input_words * kernels.tile_rows + 1), in_block = level2_bytes() * 5 / 16 / tile_bytes;
    blocks = in_block > 1 ? (tiles + in_block - 1) / in_block : tiles;
  }

  int64_t tile_row(int64_t tile) const { return tile * m / tiles; }
  int tile_height(int64_t tile) const { return static_cast<int>(tile_row(tile + 1) - tile_row(tile)); }
  int64_t block_tile(int64_t block) const { return block * tiles / blocks; }
};

// Work units [begin, end) of the order (block, panel, tile). While one panel is multiplied by the tiles of a block, each tile asks
// for its share of the next panel: weights come from memory at the arithmetic's pace instead of stopping it at each new panel.
inline void run_units(const GemmKernels& kernels, const Gemm& g, const GemmGrid& grid, int64_t begin, int64_t end) {
  constexpr int64_t near_bytes = 8192;
  const int64_t panel_bytes = kernels.panel_bytes(g.k);
  const char* const weight = static_cast<const char*>(g.weight);
  int64_t unit = begin;
  for (int64_t block = 0; block < grid.blocks && unit < end; ++block) {
    const int64_t first = grid.block_tile(block), height = grid.block_tile(block + 1) - first, base = first * grid.panels;
    const int64_t share = (panel_bytes / height + 63) / 64 * 64;
    const int64_t step = panel_bytes > 0 ? (share * panel_columns * 4 + panel_bytes - 1) / panel_bytes : 0;
    for (; unit < end && unit < base + height * grid.panels; ++unit) {
      const int64_t panel = (unit - base) / height, tile = (unit - base) % height, t = first + tile;
      // A single tile reads its weights once, at the memory's pace: ask for those a few KB ahead, panels lie in a row.
      if (height == 1) {
        kernels.compute(g, grid.tile_row(t), grid.tile_height(t), panel, Ahead{weight + panel * panel_bytes + near_bytes, 4 * panel_columns});
        continue;
      }
      const bool more = panel + 1 < grid.panels && unit + height < end;
      const Ahead ahead = more ? Ahead{weight + (panel + 1) * panel_bytes + tile * share, step} : Ahead{weight + panel * panel_bytes, 0};
      kernels.compute(g, grid.tile_row(t), grid.tile_height(t), panel, ahead);
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
  team.each(grid.tiles, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      prepare(grid.tile_row(t), grid.tile_height(t));
      kernels.pack_rows(g, grid.tile_row(t), grid.tile_height(t));
    }
  });
  team.each(grid.tiles * grid.panels, [&](int64_t begin, int64_t end) { run_units(kernels, g, grid, begin, end); });
}

inline void run_gemm(const Team& team, const Gemm& g, const GemmMemory& memory) {
  run_gemm(team, g, memory, [](int64_t, int) {});
}

}  // namespace hfca
