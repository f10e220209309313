// Winograd's convolution, spread over the threads.
#pragma once
#include <algorithm>
#include <vector>

#include "../gemm/driver.h"
#include "patches.h"
#include "winograd.h"

namespace hfca {

// The tiles of all images, numbered row by row: patches of 4 x 4 pixels, each two further than the last.
class WinogradTiles {
 public:
  // of: the patches whose convolution it is, with their zeros.
  WinogradTiles(const Patches& of, int64_t images) : tiles_(of), out_height_(of.out_height), out_width_(of.out_width) {
    tiles_.rows = {tile_side, 2, of.rows.padding}, tiles_.columns = {tile_side, 2, of.columns.padding};
    tiles_.out_height = (out_height_ + 1) / 2, tiles_.out_width = (out_width_ + 1) / 2;
    count_ = images * tiles_.out_height * tiles_.out_width;
  }

  int64_t count() const { return count_; }
  int64_t out_width() const { return out_width_; }

  // Tiles [first, first + rows): where their pixels start, and what they give.
  void set(int64_t first, int64_t rows, const void** starts, OutputTile* outputs) const {
    Patches::Place place = tiles_.place_of(first);
    for (int64_t i = 0; i < rows; ++i, tiles_.advance(place)) {
      tiles_.starts(place, starts + i * tile_positions);
      const int64_t y = 2 * place.row, x = 2 * place.column;
      outputs[i] = {static_cast<int32_t>((place.image * out_height_ + y) * out_width_ + x), x + 1 < out_width_, y + 1 < out_height_};
    }
  }

 private:
  Patches tiles_;
  int64_t out_height_, out_width_, count_;
};

// One convolution: the tiles in blocks, and for each block all of what becomes of it.
class WinogradConvolution {
 public:
  // g: k channels to n; its weight has the positions of each panel side by side. `patches` have their zeros.
  WinogradConvolution(const Gemm& g, const Patches& patches, int64_t threads)
      : g_(g), kernels_(kernels_of(g)), tiles_(patches, g.m / (patches.out_height * patches.out_width)), threads_(threads) {
    g_.input_words = kernels_.input_words(g);
    // A block's packed input and sums stay in L2 while the panels pass by; but every block reads all weights.
    constexpr int64_t least_tiles = 84, least_apart = 24;
    const int64_t room = level2_bytes() * 3 / 4 / 4,
                  fit = std::max(room / (tile_positions * (g_.input_words + panel_columns)), least_tiles);
    apart_ = threads_ == 1 || tiles_.count() >= threads_ * least_apart;
    blocks_ = apart_ ? (tiles_.count() + threads_ * fit - 1) / (threads_ * fit) * threads_ : 1;
    most_tiles_ = (tiles_.count() + blocks_ - 1) / blocks_;
    constexpr int64_t line = 16;  // so that the positions of a tile do not all meet in the same sets of the cache
    packed_apart_ = most_tiles_ * g_.input_words + line, sums_apart_ = most_tiles_ * panel_columns + line;
    steps_ = g.weight_scale ? tile_positions * most_tiles_ : 0, scratch_ = g.weight_scale ? tile_positions * g.k : 0;
  }

  size_t bytes() const {
    const size_t block = Workspace::size_of<uint32_t>(tile_positions * packed_apart_) + Workspace::size_of<OutputTile>(most_tiles_) +
                         2 * Workspace::size_of<float>(steps_);
    const size_t thread = Workspace::size_of<float>(tile_positions * sums_apart_) + Workspace::size_of<const void*>(starts()) +
                          Workspace::size_of<float>(scratch_);
    return static_cast<size_t>(memories()) * block + static_cast<size_t>(threads_) * thread;
  }

  void take(Workspace& from) {
    for (int64_t i = 0; i < memories(); ++i)
      blocks_memory_.push_back({from.take<uint32_t>(tile_positions * packed_apart_), from.take<OutputTile>(most_tiles_),
                                from.take<float>(steps_), from.take<float>(steps_)});
    for (int64_t i = 0; i < threads_; ++i)
      thread_memory_.push_back(
          {from.take<float>(tile_positions * sums_apart_), from.take<const void*>(starts()), from.take<float>(scratch_)});
  }

  void run(const Team& team) const {
    if (!apart_) return run_block(team, 0, 0, tiles_.count());
    team.each(blocks_, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        const int64_t first = block * tiles_.count() / blocks_;
        run_block(team.alone(), team.slot(), first, (block + 1) * tiles_.count() / blocks_ - first);
      }
    });
  }

 private:
  struct BlockMemory {
    uint32_t* words;
    OutputTile* outputs;
    float *scale, *zero;  // [position][tile], for integer weights
  };
  struct ThreadMemory {
    float* sums;
    const void** starts;
    float* scratch;
  };

  int64_t starts() const { return kernels_.tile_rows * tile_positions; }
  // Sets of memory for blocks: where the team works on one together it has one.
  int64_t memories() const { return apart_ ? threads_ : 1; }

  void run_block(const Team& team, int memory, int64_t first, int64_t count) const {
    const BlockMemory& block = blocks_memory_[static_cast<size_t>(memory)];
    const ThreadMemory& mine = thread_memory_[static_cast<size_t>(team.slot())];
    Gemm g = g_;  // see run_gemm
    if (g.range) g.range += team.slot() * range_numbers;
    g.m = count, g.words = block.words, g.input_scale = block.scale, g.input_zero = block.zero;
    const GemmGrid grid(g, kernels_);
    team.each(grid.tiles, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const int64_t row = grid.tile_row(t);
        tiles_.set(first + row, grid.tile_height(t), mine.starts, block.outputs + row);
        kernels_.pack_winograd(g, {mine.starts, packed_apart_, most_tiles_, mine.scratch}, row, grid.tile_height(t));
      }
    });
    team.each(grid.panels, [&](int64_t begin, int64_t end) {
      for (int64_t panel = begin; panel < end; ++panel) {
        multiply(g, grid, panel, block.words, mine.sums);
        dispatch().kernels.winograd_output(g, {block.outputs, count, tiles_.out_width(), mine.sums, sums_apart_, most_tiles_}, panel);
      }
    });
  }

  // The sums of a block with one panel. The weights of a position are asked for while the position before is multiplied.
  void multiply(Gemm& g, const GemmGrid& grid, int64_t panel, uint32_t* words, float* sums) const {
    const int64_t bytes = kernels_.panel_bytes(g), words_of_k = bytes / kernels_.word_bytes, weight_words = bytes / (4 * panel_columns);
    const int64_t share = (bytes / grid.tiles + 63) / 64 * 64, step = (share + weight_words - 1) / weight_words;
    const char* weight = static_cast<const char*>(g.weight) + panel * tile_positions * bytes;
    const Computing computing(kernels_);
    for (int64_t position = 0; position < tile_positions; ++position, weight += bytes) {
      g.words = words + position * packed_apart_;
      for (int64_t t = 0; t < grid.tiles; ++t) {
        const int64_t row = grid.tile_row(t);
        const Ahead ahead = grid.tiles == 1 ? Ahead{weight + far_bytes, 4 * panel_columns} : Ahead{weight + bytes + t * share, step};
        kernels_.compute(g, row, grid.tile_height(t), panel, weight, ahead,
                         {0, words_of_k, sums + position * sums_apart_ + row * panel_columns, false});
      }
    }
  }

  Gemm g_;
  GemmKernels kernels_;
  WinogradTiles tiles_;
  int64_t threads_, blocks_, most_tiles_, packed_apart_, sums_apart_, steps_, scratch_;
  bool apart_;
  std::vector<BlockMemory> blocks_memory_;
  std::vector<ThreadMemory> thread_memory_;
};

}  // namespace hfca
