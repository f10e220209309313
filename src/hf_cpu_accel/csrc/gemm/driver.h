// Spreads a GEMM over torch's intra-op threads.
#pragma once
#include <torch/csrc/stable/ops.h>

#include "../dispatch.h"
#include "../workspace.h"

namespace hfca {

// Sizes that depend on the tier; fill them before asking for workspace.
inline void plan_gemm(Gemm& g) { g.input_words = dispatch().gemm[static_cast<int>(g.kind)].input_words(g.k); }
inline size_t gemm_workspace(const Gemm& g) {
  return Workspace::size_of<uint32_t>(g.m * g.input_words) + 2 * Workspace::size_of<float>(g.m);
}

constexpr int64_t near_bytes = 8192;

// The shape of the work: rows in tiles of nearly equal height (no short last tile), tiles in blocks whose packed input stays in L2
// while the weight panels pass by.
struct GemmGrid {
  int64_t m, tiles, panels, blocks;

  int64_t tile_row(int64_t tile) const { return tile * m / tiles; }
  int tile_height(int64_t tile) const { return static_cast<int>(tile_row(tile + 1) - tile_row(tile)); }
  int64_t block_tile(int64_t block) const { return block * tiles / blocks; }
};

// Work units [begin, end) of the order (block, panel, tile). While one panel is multiplied by the tiles of a block, each tile asks
// for its share of the next panel: weights come from memory at the arithmetic's pace instead of stopping it at each new panel.
inline void run_units(const GemmKernels& kernels, const Gemm& g, const GemmGrid& grid, int64_t begin, int64_t end) {
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

// Units are dealt out in contiguous, equal runs: the split follows N when M is small and M when it is large, without a special case.
inline void run_gemm(Gemm& g, Workspace& workspace) {
  if (g.m == 0 || g.n == 0) return;
  const GemmKernels& kernels = dispatch().gemm[static_cast<int>(g.kind)];
  g.words = workspace.take<uint32_t>(g.m * g.input_words);
  g.input_scale = workspace.take<float>(g.m);
  g.input_zero = workspace.take<float>(g.m);

  constexpr int64_t pack_grain_words = 8192;    // below this a fork costs more than it saves
  constexpr int64_t block_words = 160 * 1024;  // 640 KB of packed input
  const int64_t words_per_tile = g.input_words * kernels.tile_rows + 1;
  GemmGrid grid{g.m, (g.m + kernels.tile_rows - 1) / kernels.tile_rows, (g.n + panel_columns - 1) / panel_columns, 1};
  const int64_t tiles_per_block = block_words / words_per_tile > 0 ? block_words / words_per_tile : 1;
  grid.blocks = (grid.tiles + tiles_per_block - 1) / tiles_per_block;

  // Each thread works on its own copy of the problem: the original lies on the calling thread's stack, whose cache lines that thread
  // keeps writing to. Reading it from the others cost a factor of 2 to 10, depending on where the stack happened to lie.
  torch::stable::parallel_for(0, grid.tiles, 1 + pack_grain_words / words_per_tile, [&](int64_t begin, int64_t end) {
    const Gemm mine = g;
    const GemmGrid cut = grid;
    const auto pack_rows = kernels.pack_rows;
    for (int64_t t = begin; t < end; ++t) pack_rows(mine, cut.tile_row(t), cut.tile_height(t));
  });
  torch::stable::parallel_for(0, grid.tiles * grid.panels, 1, [&](int64_t begin, int64_t end) {
    const Gemm mine = g;
    const GemmGrid cut = grid;
    run_units(kernels, mine, cut, begin, end);
  });
}

}  // namespace hfca
