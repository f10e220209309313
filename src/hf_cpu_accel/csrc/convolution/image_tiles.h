// The kernel of direct.h: tiles of pixels of an image in bytes, loaded from where they lie.
#pragma once
#include "../gemm/tile_gemm.h"
#include "tile_places.h"

namespace HFCA_TIER {

struct ImageTiles : TileGemm<TileInt8> {
  // Units [begin, end) of the order (panel, two tiles of pixels).
  static void compute(const Gemm& g, const hfca::TilePlaces& places, int64_t begin, int64_t end) {
    if (begin >= end) return;
    TileWork& work = TileWork::mine();
    TileWork::enter();
    const int64_t pairs = (places.count + 1) / 2, bytes = panel_bytes(g), words = weight_words(g);
    // While one panel is multiplied, each two tiles ask for their share of the next.
    const int64_t share = (bytes / pairs + 63) / 64 * 64, step = (share + words - 1) / words;
    const bool whole = requantises<true>(g);
    for (int64_t panel = begin / pairs, pair = begin % pairs, left = end - begin; left > 0; ++panel, pair = 0) {
      const char* const weight = static_cast<const char*>(g.weight) + panel * bytes;
      const bool more = left > pairs - pair;
      for (; pair < pairs && left > 0; ++pair, --left) {
        const hfca::TilePlace* const tiles = places.tiles + 2 * pair;
        const int second = 2 * pair + 1 < places.count ? tiles[1].rows : 0, rows = tiles[0].rows + second;
        const hfca::Ahead ahead = more ? hfca::Ahead{weight + bytes + pair * share, step} : hfca::Ahead{weight, 0};
        shape_for(work, tiles[0].rows, second);
        uint32_t* const sums = work.sums[work.turn];
        second > 0 ? multiply<2>(work, g, places, tiles, weight, ahead, sums) : multiply<1>(work, g, places, tiles, weight, ahead, sums);
        postpone(work, g, sums, tiles[0].first, rows, panel);
        if (whole) work.unfinished.finish = &finish_integers;
      }
    }
    TileWork::leave();
  }

 private:
  static void shape_for(TileWork& work, int first, int second) {
    if (work.now.rows[4] == first && work.now.rows[5] == second) return;
    work.now = TileShapes{};
    work.now.set(0, first), work.now.set(1, first), work.now.set(4, first);
    if (second > 0) work.now.set(2, second), work.now.set(3, second), work.now.set(5, second);
    work.now.set(6, most_tile_rows), work.now.set(7, most_tile_rows);
    Tiles::configure(work.now);
  }

  template <int inputs>
  static void multiply(TileWork& work, const Gemm& g, const hfca::TilePlaces& places, const hfca::TilePlace* tiles, const char* weight,
                       hfca::Ahead ahead, uint32_t* sums) {
    const int64_t stride = places.pixel_bytes, steps = g.k / tile_row_bytes;
    const int64_t apart = inputs == 2 ? tiles[1].offset - tiles[0].offset : 0;
    const int rows = rows_for_step(work.unfinished, steps);
    each_sum<inputs>([](auto i, int64_t) HFCA_INLINE { Tiles::zero<i>(); });
    for (int64_t j = 0; j < g.runs.count; ++j) {
      const char* input = static_cast<const char*>(g.runs.starts[j]) + tiles[0].offset;
      for (const char* const end = input + g.runs.length; input < end; input += tile_row_bytes, weight += step_bytes) {
        Tiles::load<4>(input, stride);
        Tiles::load<6>(weight, 2 * tile_row_bytes);
        Tiles::add_bytes<0, 4, 6>();
        Tiles::load<7>(weight + tile_row_bytes, 2 * tile_row_bytes);
        Tiles::add_bytes<1, 4, 7>();
        if constexpr (inputs == 2) {
          Tiles::load<5>(input + apart, stride);
          Tiles::add_bytes<2, 5, 6>();
          Tiles::add_bytes<3, 5, 7>();
        }
        ask<false>(ahead);
        if (work.unfinished.left > 0) work.unfinished.run_some(rows);
      }
    }
    if (work.unfinished.left > 0) work.unfinished.run_some(work.unfinished.left);
    each_sum<inputs>([&](auto i, int64_t at) HFCA_INLINE { Tiles::store<i>(sums + at, hfca::panel_columns * 4); }, tiles[0].rows);
  }

  // As many as make it worth to load the factors of a panel, and two at a time.
  static int rows_for_step(const Unfinished& unfinished, int64_t steps) {
    constexpr int least = 8;
    const int64_t rows = ((unfinished.left + steps - 1) / steps + 1) / 2 * 2;
    return rows > least ? static_cast<int>(rows) : least;
  }

  static void finish_integers(const Gemm& g, float* sums, int64_t row, int rows, int64_t column, int columns) {
    const auto* integers = reinterpret_cast<const int32_t*>(sums);
    columns == hfca::panel_columns ? requantise_tile<true, true>(g, integers, {row, column, rows, columns})
                                   : requantise_tile<true, false>(g, integers, {row, column, rows, columns});
  }
};

}  // namespace HFCA_TIER
