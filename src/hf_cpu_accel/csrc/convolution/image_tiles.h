// The kernel of direct.h: tiles of pixels of an image, loaded from where they lie.
#pragma once
#include "../gemm/tile_gemm.h"
#include "tile_places.h"

namespace HFCA_TIER {

template <class Kind>
struct ImageTiles : TileGemm<Kind> {
  using Base = TileGemm<Kind>;

  // Units [begin, end) of the order (two panels, two tiles of pixels, panel): a line of the output is written by two panels, one right behind
  // the other, while it is in the nearest cache.
  static void compute(const Gemm& g, const hfca::TilePlaces& places, int64_t begin, int64_t end) {
    if (begin >= end) return;
    TileWork& work = TileWork::mine();
    TileWork::enter();
    const int64_t panels = (g.n + hfca::panel_columns - 1) / hfca::panel_columns, pairs = (places.count + 1) / 2;
    const int64_t words = g.runs.count * places.steps * places.step_bytes / 4, bytes = words * hfca::panel_columns * 4;
    const bool integers = Kind::quantized && requantizes<true>(g);
    const auto* const weight = static_cast<const char*>(g.weight);
    for (int64_t unit = begin; unit < end;) {
      const int64_t panel = unit / (2 * pairs) * 2, first = panel * pairs, side = panel + 1 < panels ? 2 : 1, behind = first + side * pairs;
      // While these are multiplied, each unit asks for its share of the next.
      const int64_t stop = behind < end ? behind : end, left = panels - panel - side;
      const hfca::WeightBytes next =
          behind < end ? hfca::WeightBytes{weight + (panel + side) * bytes, (left < 2 ? left : 2) * bytes} : places.next;
      const int64_t share = (next.count / (stop - unit) + 63) / 64 * 64;
      hfca::Ahead ahead{next.first, next.count > 0 ? (share + words - 1) / words : 0};
      for (; unit < stop; ++unit, ahead.weight += share) {
        const int64_t pair = (unit - first) / side, now = panel + (unit - first) % side;
        const hfca::TilePlace* const tiles = places.tiles + 2 * pair;
        const int second = 2 * pair + 1 < places.count ? tiles[1].rows : 0, rows = tiles[0].rows + second;
        shape_for(work, tiles[0].rows, second, static_cast<int>(places.step_bytes));
        uint32_t* const sums = work.sums[work.turn];
        second > 0 ? multiply<2>(work, g, places, tiles, weight + now * bytes, ahead, sums)
                   : multiply<1>(work, g, places, tiles, weight + now * bytes, ahead, sums);
        Base::postpone(work, g, sums, tiles[0].first, rows, now);
        if (integers) work.unfinished.finish = &finish_integers;
      }
    }
    TileWork::leave();
  }

 private:
  static void shape_for(TileWork& work, int first, int second, int step_bytes) {
    if (work.now.rows[4] == first && work.now.rows[5] == second) return;
    work.now = TileShapes{};
    work.now.set(0, first), work.now.set(1, first), work.now.set(4, first, step_bytes);
    if (second > 0) work.now.set(2, second), work.now.set(3, second), work.now.set(5, second, step_bytes);
    work.now.set(6, step_bytes / 4), work.now.set(7, step_bytes / 4);
    Tiles::configure(work.now);
  }

  template <int inputs>
  static void multiply(TileWork& work, const Gemm& g, const hfca::TilePlaces& places, const hfca::TilePlace* tiles, const char* weight,
                       hfca::Ahead ahead, uint32_t* sums) {
    const int64_t stride = places.pixel_bytes, steps = g.runs.count * places.steps;
    const int64_t apart = inputs == 2 ? tiles[1].offset - tiles[0].offset : 0;
    const int rows = rows_for_step(work.unfinished, steps);
    Base::template each_sum<inputs>([](auto i, int64_t) HFCA_INLINE { Tiles::zero<i>(); });
    for (int64_t j = 0; j < g.runs.count; ++j) {
      const char* input = static_cast<const char*>(g.runs.starts[j]) + tiles[0].offset;
      for (int64_t s = 0; s < places.steps; ++s) {
        Tiles::load<4>(input, stride);
        Tiles::load<6>(weight, 2 * tile_row_bytes);
        Kind::template add<0, 4, 6>();
        Tiles::load<7>(weight + tile_row_bytes, 2 * tile_row_bytes);
        Kind::template add<1, 4, 7>();
        if constexpr (inputs == 2) {
          Tiles::load<5>(input + apart, stride);
          Kind::template add<2, 5, 6>();
          Kind::template add<3, 5, 7>();
        }
        input += places.step_bytes, weight += places.step_bytes * hfca::panel_columns;
        Base::template ask<false>(ahead);
        if (work.unfinished.left > 0) work.unfinished.run_some(rows);
      }
    }
    if (work.unfinished.left > 0) work.unfinished.run_some(work.unfinished.left);
    const auto store = [&](auto i, int64_t at) HFCA_INLINE { Tiles::store<i>(sums + at, hfca::panel_columns * 4); };
    Base::template each_sum<inputs>(store, tiles[0].rows);
  }

  // As many as make it worth to load the factors of a panel, and two at a time.
  static int rows_for_step(const Unfinished& unfinished, int64_t steps) {
    constexpr int least = 8;
    const int64_t rows = ((unfinished.left + steps - 1) / steps + 1) / 2 * 2;
    return rows > least ? static_cast<int>(rows) : least;
  }

  static void finish_integers(const Gemm& g, float* sums, int64_t row, int rows, int64_t column, int columns) {
    const auto* integers = reinterpret_cast<const int32_t*>(sums);
    columns == hfca::panel_columns ? requantize_tile<true, true>(g, integers, {row, column, rows, columns})
                                   : requantize_tile<true, false>(g, integers, {row, column, rows, columns});
  }
};

}  // namespace HFCA_TIER
