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

// Rows are cut into tiles of nearly equal height (no short last tile), tiles into blocks whose packed input stays in L2 while the
// weight panels pass by. Work units (block, panel, tile) are dealt out in contiguous, equal runs: the split follows N when M is
// small and M when it is large, without a special case.
inline void run_gemm(Gemm& g, Workspace& workspace) {
  if (g.m == 0 || g.n == 0) return;
  const GemmKernels& kernels = dispatch().gemm[static_cast<int>(g.kind)];
  g.words = workspace.take<uint32_t>(g.m * g.input_words);
  g.input_scale = workspace.take<float>(g.m);
  g.input_zero = workspace.take<float>(g.m);

  const int64_t tiles = (g.m + kernels.tile_rows - 1) / kernels.tile_rows;
  const int64_t panels = (g.n + panel_columns - 1) / panel_columns;
  const auto tile_row = [&](int64_t tile) { return tile * g.m / tiles; };

  constexpr int64_t pack_grain_words = 8192;  // below this a fork costs more than it saves
  const int64_t words_per_tile = g.input_words * kernels.tile_rows + 1;
  torch::stable::parallel_for(0, tiles, 1 + pack_grain_words / words_per_tile, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) kernels.pack_rows(g, tile_row(t), static_cast<int>(tile_row(t + 1) - tile_row(t)));
  });

  constexpr int64_t block_words = 160 * 1024;  // 640 KB of packed input
  const int64_t tiles_per_block = block_words / words_per_tile > 0 ? block_words / words_per_tile : 1;
  const int64_t blocks = (tiles + tiles_per_block - 1) / tiles_per_block;
  const auto block_tile = [&](int64_t block) { return block * tiles / blocks; };
  const int64_t panel_bytes = kernels.panel_bytes(g.k);
  const auto panel_weight = [&](int64_t panel) { return static_cast<const char*>(g.weight) + panel * panel_bytes; };
  torch::stable::parallel_for(0, tiles * panels, 1, [&](int64_t begin, int64_t end) {
    int64_t block = 0;
    while (block_tile(block + 1) * panels <= begin) ++block;
    int64_t height = block_tile(block + 1) - block_tile(block);
    int64_t panel = (begin - block_tile(block) * panels) / height, tile = (begin - block_tile(block) * panels) % height;
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t t = block_tile(block) + tile;
      // While one panel is multiplied by the tiles of the block, each tile asks for its share of the next one: weights come from
      // memory at the arithmetic's pace instead of stopping it at each new panel.
      const bool more = panel + 1 < panels && unit + height < end;
      const int64_t share = (panel_bytes / height + 63) / 64 * 64;
      const Ahead ahead = more ? Ahead{panel_weight(panel + 1) + tile * share, (share * panel_columns * 4 + panel_bytes - 1) / panel_bytes}
                               : Ahead{panel_weight(panel), 0};
      kernels.compute(g, tile_row(t), static_cast<int>(tile_row(t + 1) - tile_row(t)), panel, ahead);
      if (++tile == height) {
        tile = 0;
        if (++panel == panels && block + 1 < blocks) {
          panel = 0;
          ++block;
          height = block_tile(block + 1) - block_tile(block);
        }
      }
    }
  });
}

}  // namespace hfca
