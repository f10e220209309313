// Convolutions of images in bytes by AMX tiles, which load pixels from where they lie: nothing is packed.
//
// What a pixel of the window sees of an image with a border is the same image, some pixels further on. So a tile of output pixels that lie
// equally far apart in the image stays one for every pixel of the window. Where windows move by one pixel these are any places that follow
// one another, borders too: all rows of all images are one, and what comes of borders is written to a spare pixel (1.8 % of the work where
// images are 56 pixels wide, 14 % where they are 7). Elsewhere they are pixels of one row.
#pragma once
#include <algorithm>
#include <cstring>
#include <vector>

#include "../cache.h"
#include "../dispatch.h"
#include "../team.h"
#include "images.h"
#include "patches.h"

namespace hfca {

inline bool has_direct_convolutions() { return dispatch().kernels.image_tiles.bytes; }

// Where in memory rows of a product lie that are all places of `grid`: the pixels of `images`, and `elsewhere` for its borders.
class Places {
 public:
  Places(const Images& grid, const Images& images, int64_t elsewhere)
      : index_(static_cast<size_t>(rows(grid, images)), static_cast<int32_t>(elsewhere)) {
    for (int64_t image = 0; image < grid.count; ++image)
      for (int64_t y = 0; y < images.height; ++y) {
        int32_t* const row = index_.data() + grid.place(image, y, 0);
        const auto first = static_cast<int32_t>(images.place(image, y, 0));
        for (int64_t x = 0; x < images.width; ++x) row[x] = first + static_cast<int32_t>(x);
      }
  }
  const int32_t* index() const { return index_.data(); }

  // From the first pixel of what is made to the last.
  static int64_t rows(const Images& grid, const Images& images) {
    return grid.place(grid.count - 1, images.height - 1, images.width - 1) + 1;
  }

 private:
  std::vector<int32_t> index_;
};

// Whether rows of the product are all places of the source: else they are the pixels of the output. Only images in bytes have a spare pixel.
inline bool takes_all_places(const Patches& window, const Images& source, const Images& output) {
  const auto fits = [](const WindowSide& side) {
    return side.stride == 1 && side.more == 0 && side.dilation * (side.size - 1) >= side.padding;
  };
  const bool same = source.border == 0 && !window.have_several_pixels();
  return fits(window.rows) && fits(window.columns) && (same || output.pixels.bytes);
}

class DirectConvolution {
 public:
  // all_places: see above; g's outputs and residual have the indices of Places that fit that. Runs are the pixels of a window, and of images
  // that are not bytes its rows, each one step.
  DirectConvolution(const Gemm& g, const Images& source, const Patches& window, bool all_places) : g_(g) {
    const bool bytes = source.pixels.bytes;
    compute_ = bytes ? dispatch().kernels.image_tiles.bytes : dispatch().kernels.image_tiles.few_channels;
    for (int64_t i = 0; i < window.rows.size; ++i)
      for (int64_t j = 0; j < (bytes ? window.columns.size : 1); ++j) {
        const int64_t y = i * window.rows.dilation - window.rows.padding, x = j * window.columns.dilation - window.columns.padding;
        starts_.push_back(static_cast<const char*>(source.pixels.data) + source.place(0, y, x) * source.pixel_bytes());
      }
    const int64_t run_bytes = source.pixel_bytes() * (bytes ? 1 : window.columns.size);
    step_bytes_ = bytes ? line_bytes : run_bytes, steps_ = run_bytes / step_bytes_;
    g_.input = source.pixels, g_.runs.count = static_cast<int64_t>(starts_.size());
    pixel_bytes_ = window.columns.stride * source.pixel_bytes();
    if (all_places) add_tiles(0, 0, g.m);
    else
      for (int64_t image = 0; image < source.count; ++image)
        for (int64_t y = 0; y < window.out_height; ++y)
          add_tiles(source.place(image, y * window.rows.stride, 0) * source.pixel_bytes(),
                    (image * window.out_height + y) * window.out_width, window.out_width);
    if (!bytes) return;
    const bool plain = g.activation == Activation::none || g.activation == Activation::relu;
    if (plain && g.outputs[0].bytes && (!g.residual.data || g.residual.bytes)) return;
    const auto rows = static_cast<size_t>(g.m);
    scale_.assign(rows, source.pixels.bytes->scale), zero_.assign(rows, source.pixels.bytes->zero);
  }

  // The panel of the weight that a thread begins with.
  WeightBytes first_panel(const Team& team) const {
    const int64_t bytes = static_cast<int64_t>(starts_.size()) * steps_ * step_bytes_ * panel_columns;
    int64_t panel = 0;
    if (by_panels()) team.share(pairs() * panels(), [&](int64_t begin, int64_t) { panel = begin / (2 * pairs()) * 2; });
    return {static_cast<const char*>(g_.weight) + panel * bytes, bytes};
  }

  // next: what its threads read after it.
  void run(const Team& team, WeightBytes next) const {
    Gemm g = g_;  // see run_gemm
    if (g.range) g.range += team.slot() * range_numbers;
    g.runs.starts = starts_.data();
    g.input_scale = const_cast<float*>(scale_.data()), g.input_zero = const_cast<float*>(zero_.data());
    const auto pixels = [&](int64_t begin, int64_t end, WeightBytes after, const auto& f) {
      const int64_t last = std::min(2 * end, static_cast<int64_t>(tiles_.size()));
      f(TilePlaces{tiles_.data() + 2 * begin, last - 2 * begin, pixel_bytes_, steps_, step_bytes_, after}, end - begin);
    };
    if (by_panels())
      return team.each(pairs() * panels(), [&](int64_t begin, int64_t end) {
        pixels(0, pairs(), next, [&](const TilePlaces& all, int64_t) { compute_(g, all, begin, end); });
      });
    team.each(pairs(), [&](int64_t begin, int64_t end) {
      // The input of a block stays in L2 while the panels pass by.
      const int64_t block = std::max(level2_bytes() / 2 / (2 * most_rows * pixel_bytes_), int64_t{4});
      for (int64_t first = begin; first < end; first += block) {
        const WeightBytes after = first + block < end ? WeightBytes{} : next;
        pixels(first, std::min(first + block, end), after,
               [&](const TilePlaces& some, int64_t count) { compute_(g, some, 0, count * panels()); });
      }
    });
  }

 private:
  static constexpr int64_t most_rows = 16, line_bytes = 64;

  int64_t panels() const { return (g_.n + panel_columns - 1) / panel_columns; }
  int64_t pairs() const { return (static_cast<int64_t>(tiles_.size()) + 1) / 2; }
  // Where weights are small, each thread takes all panels of some rows: what it has made it then reads itself.
  bool by_panels() const { return g_.m * steps_ * step_bytes_ < g_.n * g_.k; }

  // Of `count` rows that follow one another.
  void add_tiles(int64_t offset, int64_t first, int64_t count) {
    const int64_t parts = (count + most_rows - 1) / most_rows;
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t begin = part * count / parts, end = (part + 1) * count / parts;
      tiles_.push_back({offset + begin * pixel_bytes_, first + begin, static_cast<int32_t>(end - begin)});
    }
  }

  Gemm g_;
  int64_t pixel_bytes_, step_bytes_, steps_;
  ImageTilesKernel compute_;
  std::vector<const void*> starts_;
  std::vector<TilePlace> tiles_;
  std::vector<float> scale_, zero_;  // of each row, for results that take them from there
};

// The border of images, which is the byte of zero.
inline void fill_border(const Team& team, const Images& images) {
  const int zero = static_cast<int>(images.pixels.bytes->zero);
  const int64_t border_bytes = images.border * images.pixel_bytes(), row_bytes = images.row_pixels() * images.pixel_bytes();
  const int64_t rows_apart = images.height + images.border, rows = images.border + images.count * rows_apart;
  char* const memory = static_cast<char*>(images.memory());
  team.share(rows + 1, [&](int64_t begin, int64_t end) {  // of the last only what is to the right of the one before
    for (int64_t row = begin; row < end; ++row) {
      const bool whole = row < images.border || (row < rows && (row - images.border) % rows_apart >= images.height);
      std::memset(memory + row * row_bytes, zero, static_cast<size_t>(whole ? row_bytes : border_bytes));
    }
  });
}

}  // namespace hfca
