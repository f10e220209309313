// What each output pixel of a convolution is computed from, as one row: with that, a convolution is a GEMM.
//
// Images lie with their channels last, [batch, height, width, channels], so a patch is a few runs of adjacent memory: the channels of
// each pixel. Where these fill whole lines of packed input they are packed from where they lie (Dukhan 2019, The Indirect Convolution
// Algorithm, arXiv:1907.02129). Else a patch is gathered from a copy of the image (padded_images.h) right before it is packed, by the
// thread that packs it, and never goes to memory.
#pragma once
#include <cstdint>

#include "gather.h"

namespace hfca {

// One side of the window: how many pixels it has, how far apart they and the windows are, and how many pixels of zeros surround the image,
// with how many more behind it.
struct WindowSide {
  int64_t size = 1, stride = 1, padding = 0, dilation = 1, more = 0;

  // The pixels that so many outputs are computed from, with those between them.
  int64_t reach(int64_t outputs) const { return (outputs - 1) * stride + dilation * (size - 1) + 1; }
  // How often it fits into so many pixels.
  int64_t outputs(int64_t pixels) const {
    const int64_t rest = pixels + 2 * padding + more - dilation * (size - 1) - 1;
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
    const auto plain = [](const WindowSide& side) { return side.size == 1 && side.stride == 1 && side.padding == 0 && side.more == 0; };
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
    each_pixel(output, [&](const char* pixel) { *to++ = pixel ? pixel : beside; });
  }

  // The same without those beside the image; how many there are.
  int64_t within(const Place& output, const void** to) const {
    const void** next = to;
    each_pixel(output, [&](const char* pixel) {
      if (pixel) *next++ = pixel;
    });
    return next - to;
  }

  // Where its patch lies, one piece for each row of the window or, dilated, each pixel: where no window reaches beyond the image.
  Pieces pieces(const Place& output) const {
    const char* const first =
        data + ((output.image * height + output.row * rows.stride) * width + output.column * columns.stride) * pixel_bytes;
    const bool together = columns.dilation == 1;
    return {first,
            rows.size,
            rows.dilation * width * pixel_bytes,
            together ? 1 : columns.size,
            columns.dilation * pixel_bytes,
            together ? columns.size * pixel_bytes : pixel_bytes};
  }

 private:
  // f(pixel) for each pixel of the window of an output pixel; null where it is beside the image.
  template <class F>
  void each_pixel(const Place& output, const F& f) const {
    const int64_t x = output.column * columns.stride - columns.padding, y = output.row * rows.stride - rows.padding;
    for (int64_t i = 0; i < rows.size; ++i) {
      const int64_t row = y + i * rows.dilation;
      const char* const line = row >= 0 && row < height ? data + (output.image * height + row) * width * pixel_bytes : nullptr;
      for (int64_t j = 0; j < columns.size; ++j) {
        const int64_t column = x + j * columns.dilation;
        f(line && column >= 0 && column < width ? line + column * pixel_bytes : nullptr);
      }
    }
  }
};

}  // namespace hfca
