// Convolutions of images with few channels, such as photos, in bfloat16 by AMX tiles: a row of a window is one piece of memory of a copy of
// the image, and so are 16 of them that lie equally far apart. In the copy pixels have an even number of channels, since products are of
// pairs, and zeros around them: then pieces have nothing but what their windows see, and zeros.
#pragma once
#include <cstring>
#include <memory>
#include <optional>

#include "direct.h"
#include "padded_images.h"

namespace hfca {

class FewChannelConvolution {
 public:
  static bool takes(const Gemm& g, const Images& source, const Patches& window) {
    constexpr int64_t most_pairs = 16;  // of a row of a window
    return g.kind == WeightKind::bfloat16 && dispatch().kernels.image_tiles.few_channels && window.have_several_pixels() &&
           window.columns.dilation == 1 && window.columns.size * pairs_of(source) <= most_pairs && !source.pixels.bytes;
  }

  FewChannelConvolution(const Gemm& g, const Images& source, const Patches& window)
      : g_(g), source_(source), copy_(source, window, true, 2 * pairs_of(source)) {
    weight_ = std::make_unique<Workspace>(Workspace::size_of<uint16_t>(panels() * panel_values()));
    auto* const weight = weight_->take<uint16_t>(panels() * panel_values());
    arrange(static_cast<const uint16_t*>(g_.weight), weight);
    g_.weight = weight;
  }

  size_t bytes() const { return copy_.memory(); }

  void take(Workspace& from) {
    copy_.take(from);
    const Patches& window = copy_.patches();
    void* const pixels = const_cast<char*>(copy_.data());
    const int64_t channels = 2 * pairs_of(source_);
    direct_.emplace(g_, Images::dense({pixels, channels, true}, source_.count, window.height, window.width, channels), window, false);
  }

  // The images are there from now on.
  void read(void* pixels) { copy_.read(pixels); }

  void run(const Team& team, WeightBytes next) const {
    copy_.make(team);
    direct_->run(team, next);
  }

 private:
  static int64_t pairs_of(const Images& source) { return (source.channels + 1) / 2; }
  int64_t panels() const { return (g_.n + panel_columns - 1) / panel_columns; }
  int64_t panel_values() const { return copy_.patches().pixels() * 2 * pairs_of(source_) * panel_columns; }

  // Panels of pairs of values for all features, of which the copy has pairs that start with each pixel.
  void arrange(const uint16_t* from, uint16_t* to) const {
    const int64_t channels = source_.channels, pixels = copy_.patches().pixels(), pairs = pairs_of(source_);
    std::memset(to, 0, static_cast<size_t>(panels() * panel_values()) * sizeof(uint16_t));
    for (int64_t panel = 0; panel < panels(); ++panel, to += panel_values(), from += (g_.k + 1) / 2 * 2 * panel_columns)
      for (int64_t k = 0; k < pixels * channels; ++k) {
        const int64_t c = k % channels;
        const uint16_t* const value = from + k / 2 * 2 * panel_columns + k % 2;
        uint16_t* const there = to + (k / channels * pairs + c / 2) * 2 * panel_columns + c % 2;
        for (int n = 0; n < 2 * panel_columns; n += 2) there[n] = value[n];
      }
  }

  Gemm g_;
  Images source_;
  PaddedImages copy_;
  std::unique_ptr<Workspace> weight_;
  std::optional<DirectConvolution> direct_;
};

}  // namespace hfca
