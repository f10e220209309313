// Images whose channels do not fill whole lines of packed input, copied once with the zeros around them and in the numbers that are
// multiplied: then a row of a window is one piece of memory, wherever the window lies.
#pragma once
#include <algorithm>
#include <cstring>

#include "../dispatch.h"
#include "../team.h"
#include "../workspace.h"
#include "images.h"
#include "patches.h"

namespace hfca {

class PaddedImages {
 public:
  // bf16: the numbers of the copy. channels: of its pixels, at least those of the images; what is more is zero.
  PaddedImages(const Images& images, const Patches& of, bool bf16, int64_t channels)
      : images_(images), of_(of), bf16_(bf16), channels_(channels) {
    padded_ = of;
    padded_.height = of.rows.reach(of.out_height), padded_.width = of.columns.reach(of.out_width);
    padded_.rows.padding = padded_.columns.padding = 0;
    padded_.channel_bytes = padded_.pixel_bytes = channels * (bf16 ? 2 : 4);
  }

  bool is_bf16() const { return bf16_; }
  size_t memory() const { return Workspace::size_of<char>(images_.count * padded_.height * row_bytes() + copied_bytes); }
  void take(Workspace& from) { data_ = from.take<char>(images_.count * padded_.height * row_bytes() + copied_bytes); }

  // The images are there from now on.
  void read(void* pixels) { images_.pixels.data = pixels; }

  // The patches of the copy, which has them all, but for where it is.
  const Patches& patches() const { return padded_; }
  const char* data() const { return data_; }

  void make(const Team& team) const {
    team.each(images_.count * padded_.height, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        make_row(row / padded_.height, row % padded_.height - of_.rows.padding, data_ + row * row_bytes());
    });
  }

 private:
  int64_t row_bytes() const { return padded_.width * padded_.pixel_bytes; }

  void make_row(int64_t image, int64_t y, char* to) const {
    const bool within = y >= 0 && y < images_.height;
    const int64_t before = within ? std::min(of_.columns.padding, padded_.width) : padded_.width;
    const int64_t pixels = std::min(images_.width, padded_.width - before);
    const auto zeros = [&](int64_t first, int64_t count) {
      std::memset(to + first * padded_.pixel_bytes, 0, static_cast<size_t>(count * padded_.pixel_bytes));
    };
    zeros(0, before);
    if (!within) return;
    const int64_t first = image * images_.apart.image + y * images_.apart.row;
    const char* const from = static_cast<const char*>(images_.pixels.data) + first * images_.element_bytes();
    dispatch().kernels.pixels.copy({from, images_.pixels.bf16, images_.apart.pixel, images_.apart.channel, images_.channels}, pixels,
                                   channels_, to + before * padded_.pixel_bytes, bf16_);
    zeros(before + pixels, padded_.width - before - pixels);
  }

  Images images_;
  Patches of_, padded_;
  bool bf16_;
  int64_t channels_;
  char* data_ = nullptr;
};

}  // namespace hfca
