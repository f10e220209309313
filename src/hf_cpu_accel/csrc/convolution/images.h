// Images in memory.
#pragma once
#include "../gemm/gemm.h"

namespace hfca {

// Elements from one image, row, pixel and channel to the next.
struct Apart {
  int64_t image, row, pixel, channel;
};

// Those of every image but the input of an op lie densely, with the channels of a pixel last: then `pixels` are the rows of a matrix. Or
// there are `border` pixels that stand for zero before each row, which also are those behind the row before, and as many rows of them
// before each image and behind the last: then windows of a direct convolution (direct.h) never reach beyond the memory.
struct Images {
  Matrix pixels;  // its data: the first pixel
  int64_t count = 0, height = 0, width = 0, channels = 0;
  Apart apart{};
  int64_t border = 0;

  static Images dense(const Matrix& pixels, int64_t count, int64_t height, int64_t width, int64_t channels) {
    return {pixels, count, height, width, channels, {height * width * pixels.stride, width * pixels.stride, pixels.stride, 1}};
  }

  int64_t element_bytes() const { return pixels.element_bytes(); }
  int64_t pixel_bytes() const { return channels * element_bytes(); }

  // With the border: pixels from one row to the next, from one image to the next, and before the first pixel.
  int64_t row_pixels() const { return width + border; }
  int64_t image_pixels() const { return (height + border) * row_pixels(); }
  int64_t pixels_before() const { return border * (row_pixels() + 1); }
  // Pixels from the first one to that.
  int64_t place(int64_t image, int64_t row, int64_t column) const { return image * image_pixels() + row * row_pixels() + column; }
  // Behind all others: for what nobody reads.
  int64_t spare_place() const { return count * image_pixels(); }

  // Of all pixels, the border and the spare one.
  size_t bytes() const { return static_cast<size_t>((pixels_before() + count * image_pixels() + 1) * pixel_bytes()); }
  void lie_in(void* memory) { pixels.data = static_cast<char*>(memory) + pixels_before() * pixel_bytes(); }
  void* memory() const { return static_cast<char*>(pixels.data) - pixels_before() * pixel_bytes(); }
};

}  // namespace hfca
