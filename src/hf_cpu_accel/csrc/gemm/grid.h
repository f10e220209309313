// How a GEMM is cut: rows into tiles and blocks, k into parts, output features into panels and groups of them.
#pragma once
#include <algorithm>

#include "../cache.h"
#include "gemm.h"

namespace hfca {

// Rows in tiles of nearly equal height (no short last tile) in the kernels' units, tiles in blocks whose packed input stays in L2 while the
// weight panels pass by. Every block reads all weights.
//
// Where k is long, a part of it is multiplied at a time, by all panels of a group, and their sums wait for the next part. For vectors
// parts are as long as blocks of some height allow, and a group is all panels. AMX tiles multiply faster than L2 gives them both sides:
// there the part of a panel stays in the nearest cache while all tiles of a block pass by.
struct GemmGrid {
  int64_t m, unit, units;         // of rows
  int64_t tiles, panels, blocks;  // gated: a panel of the gate and the one that it is multiplied by count as one
  int64_t part_words, parts;
  int64_t group;  // panels

  GemmGrid(const Gemm& g, const GemmKernels& kernels)
      : m(g.m),
        unit(kernels.row_unit),
        units((g.m + unit - 1) / unit),
        tiles((g.m + kernels.tile_rows - 1) / kernels.tile_rows),
        panels((g.n + panel_columns - 1) / panel_columns / (g.gated ? 2 : 1)) {
    kernels.near_words > 0 ? cut_for_tiles(g, kernels) : cut_for_vectors(g, kernels);
  }

  int64_t tile_row(int64_t tile) const { return std::min(tile * units / tiles * unit, m); }
  int tile_height(int64_t tile) const { return static_cast<int>(tile_row(tile + 1) - tile_row(tile)); }
  int64_t block_tile(int64_t block) const { return block * tiles / blocks; }
  int64_t block_rows(int64_t block) const { return tile_row(block_tile(block + 1)) - tile_row(block_tile(block)); }

  // Rows of sums of one panel that a thread with so many units keeps between parts: those of all panels of a group that it meets in a block.
  int64_t most_sums(int64_t units, int64_t sides) const {
    int64_t most = 0;
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t met = std::min({units / (block_tile(block + 1) - block_tile(block)) + 2, panels, group});
      most = std::max(most, met * sides * block_rows(block));
    }
    return most;
  }

 private:
  static constexpr int64_t wanted_rows = 128;  // of a block: with fewer, memory would be the limit

  static int64_t cut(int64_t length, int64_t most) { return (length + most - 1) / std::max(most, int64_t{1}); }

  void cut_k(int64_t words, int64_t pieces, int64_t multiple) {
    part_words = (cut(words, pieces) + multiple - 1) / multiple * multiple;
    parts = std::max(cut(words, part_words), int64_t{1});
  }

  void cut_for_vectors(const Gemm& g, const GemmKernels& kernels) {
    constexpr int64_t least_tiles = 3;
    const int64_t multiple = g.input_words > longest_chain ? section_words : 16;  // 16: whole lines of packed input
    const int64_t room = level2_bytes() * 5 / 16 / 4;
    const auto in_block = [&](int64_t words) { return std::max(room / (words * kernels.tile_rows + 1), int64_t{1}); };
    const bool divided = kernels.word_bytes > 0 && in_block(g.input_words) < std::min(tiles, least_tiles);
    cut_k(g.input_words, divided ? cut(g.input_words * std::min(m, wanted_rows), room) : 1, multiple);
    blocks = cut(tiles, in_block(part_words));
    group = panels;
  }

  // Where the input of some rows does not fit L2, the sums of many rows and of as many panels as fit do: input and weights then pass by once
  // for each group.
  void cut_for_tiles(const Gemm& g, const GemmKernels& kernels) {
    constexpr int64_t most_rows = 512, lines = 32;  // parts: whole groups of int4
    const int64_t room = level2_bytes() / 2 / 4, fit = room / std::max(g.input_words, int64_t{1});
    const bool whole = fit >= std::min(m, wanted_rows);
    cut_k(g.input_words, tiles > 1 ? cut(g.input_words, kernels.near_words) : 1, lines);
    blocks = cut(tiles, std::max((whole ? fit : most_rows) / kernels.tile_rows, int64_t{1}));
    const int64_t sums = std::min(m, most_rows) * kernels.row_lines * panel_columns * (g.gated ? 2 : 1);
    group = whole ? 1 : std::max(room / sums, int64_t{1});
  }
};

}  // namespace hfca
