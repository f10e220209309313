// What each output pixel of a convolution is computed from, as one row: with that, a convolution is a GEMM.
//
// Images lie with their channels last, [batch, height, width, channels], so a patch is a few runs of adjacent memory: the channels of
// each pixel. Where these fill whole lines of packed input they are packed from where they lie (Dukhan 2019, The Indirect Convolution
// Algorithm, arXiv:1907.02129). Else a patch is gathered right before it is packed, by the thread that packs it, and never goes to memory.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

namespace hfca {

// One side of the window: how many pixels it has, how far apart they and the windows are, and how many pixels of zeros surround the image.
struct WindowSide {
  int64_t size = 1, stride = 1, padding = 0, dilation = 1;

  // How often it fits into so many pixels.
  int64_t outputs(int64_t pixels) const {
    const int64_t rest = pixels + 2 * padding - dilation * (size - 1) - 1;
    return rest < 0 ? 0 : rest / stride + 1;
  }
};

struct Patches {
  const char* data = nullptr;
  int64_t pixel_bytes = 0, channel_bytes = 0;  // from one pixel to the next, and all channels of one
  int64_t height = 0, width = 0;
  WindowSide rows, columns;
  int64_t out_height = 0, out_width = 0;
  const char* zeros = nullptr;  // what stands for a pixel beside an image, so far apart for one image and the next
  int64_t zeros_apart = 0;

  // Whether every output pixel is computed from the input pixel of its number: the patches are the image.
  bool are_pixels() const {
    const auto plain = [](const WindowSide& side) { return side.size == 1 && side.stride == 1 && side.padding == 0; };
    return plain(rows) && plain(columns);
  }

  // Whether a window has several pixels, which others may share.
  bool have_several_pixels() const { return pixels() > 1; }

  int64_t pixels() const { return rows.size * columns.size; }
  int64_t bytes() const { return pixels() * channel_bytes; }

  // An output pixel: its image, row and column.
  struct Place {
    int64_t image, row, column;
  };
  Place place_of(int64_t output) const { return {output / out_width / out_height, output / out_width % out_height, output % out_width}; }
  // The next one, without the divisions.
  void advance(Place& place) const {
    if (++place.column < out_width) return;
    place.column = 0;
    if (++place.row < out_height) return;
    place.row = 0, ++place.image;
  }

  // Where the pixels of its patch start, in the order [window row, window column].
  void starts(const Place& output, const void** to) const {
    const char* const beside = zeros + output.image * zeros_apart;
    each_row(output, [&](const char* image_row, int64_t x) {
      for (int64_t j = 0; j < columns.size; ++j, x += columns.dilation)
        *to++ = image_row && x >= 0 && x < width ? image_row + x * pixel_bytes : beside;
    });
  }

  // Its patch, in the order [window row, window column, channel].
  void gather(const Place& output, char* to) const {
    each_row(output, [&](const char* image_row, int64_t x) {
      if (image_row) gather_row(image_row, x, to);
      else std::memset(to, 0, static_cast<size_t>(columns.size * channel_bytes));
      to += columns.size * channel_bytes;
    });
  }

 private:
  // f(image row, first column) for each row of the window of an output pixel; null where the row is beside the image.
  template <class F>
  void each_row(const Place& output, const F& f) const {
    const int64_t x = output.column * columns.stride - columns.padding, y = output.row * rows.stride - rows.padding;
    const char* const image = data + output.image * height * width * pixel_bytes;
    for (int64_t i = 0; i < rows.size; ++i) {
      const int64_t row = y + i * rows.dilation;
      f(row >= 0 && row < height ? image + row * width * pixel_bytes : nullptr, x);
    }
  }

  void gather_row(const char* image_row, int64_t x, char* to) const {
    if (columns.dilation == 1 && pixel_bytes == channel_bytes) {
      const int64_t before = std::clamp(-x, int64_t{0}, columns.size), after = std::clamp(x + columns.size - width, int64_t{0}, columns.size - before);
      const int64_t within = columns.size - before - after;
      std::memset(to, 0, static_cast<size_t>(before * channel_bytes));
      if (within > 0) std::memcpy(to + before * channel_bytes, image_row + (x + before) * pixel_bytes, static_cast<size_t>(within * channel_bytes));
      std::memset(to + (before + within) * channel_bytes, 0, static_cast<size_t>(after * channel_bytes));
      return;
    }
    for (int64_t j = 0; j < columns.size; ++j, to += channel_bytes) {
      const int64_t column = x + j * columns.dilation;
      if (column >= 0 && column < width) std::memcpy(to, image_row + column * pixel_bytes, static_cast<size_t>(channel_bytes));
      else std::memset(to, 0, static_cast<size_t>(channel_bytes));
    }
  }
};

}  // namespace hfca
