// Images in memory.
#pragma once
#include "../gemm/gemm.h"

namespace hfca {

// Elements from one image, row, pixel and channel to the next.
struct Apart {
  int64_t image, row, pixel, channel;
};

// Those of every image but the input of an op lie densely, with the channels of a pixel last: then `pixels` are the rows of a matrix.
struct Images {
  Matrix pixels;
  int64_t count = 0, height = 0, width = 0, channels = 0;
  Apart apart{};

  static Images dense(const Matrix& pixels, int64_t count, int64_t height, int64_t width, int64_t channels) {
    return {pixels, count, height, width, channels, {height * width * pixels.stride, width * pixels.stride, pixels.stride, 1}};
  }

  int64_t element_bytes() const { return pixels.element_bytes(); }
  size_t bytes() const { return static_cast<size_t>(count * height * width * channels * element_bytes()); }
};

}  // namespace hfca
