// The input of a convolution in int8: each image quantised once, over the range of all its values. Patches then are bytes that lie in the
// image, where pixels would otherwise be quantised once for each window that sees them.
#pragma once
#include <algorithm>

#include "../dispatch.h"
#include "../team.h"
#include "../workspace.h"
#include "patches.h"

namespace hfca {

class ByteImages {
 public:
  // pixels: of all images, `images` of height x width of them.
  ByteImages(const Matrix& pixels, int64_t images, int64_t pixels_of_image, int64_t channels, int64_t threads)
      : pixels_(pixels),
        images_(images),
        pixels_of_image_(pixels_of_image),
        channels_(channels),
        pieces_(threads),
        memory_(Workspace::size_of<uint8_t>((images * pixels_of_image + images) * channels) + Workspace::size_of<float>(2 * images * threads) +
                Workspace::size_of<ByteSteps>(images)),
        bytes_(memory_.take<uint8_t>((images * pixels_of_image + images) * channels)),
        ranges_(memory_.take<float>(2 * images * threads)),
        steps_(memory_.take<ByteSteps>(images)) {}

  // The patches of these images instead of those that they are made of.
  Patches patches(Patches of) const {
    of.data = reinterpret_cast<const char*>(bytes_);
    of.pixel_bytes = of.channel_bytes = of.zeros_apart = channels_;
    of.zeros = of.data + images_ * pixels_of_image_ * channels_;
    return of;
  }

  void make(const Team& team) const {
    const ImageKernels& kernels = dispatch().images;
    each_piece(team, [&](int64_t image, int64_t piece, int64_t begin, int64_t end) {
      kernels.range(pixels_, channels_, begin, end, ranges_ + 2 * (image * pieces_ + piece));
    });
    each_piece(team, [&](int64_t image, int64_t piece, int64_t begin, int64_t end) {
      const ByteSteps steps = steps_of(image);
      kernels.quantise(pixels_, channels_, begin, end, steps, bytes_ + begin * channels_);
      if (piece > 0) return;
      steps_[image] = steps;
      std::fill_n(bytes_ + (images_ * pixels_of_image_ + image) * channels_, channels_, static_cast<uint8_t>(steps.zero));
    });
  }

  const ByteSteps& steps(int64_t image) const { return steps_[image]; }

 private:
  template <class F>
  void each_piece(const Team& team, const F& f) const {
    team.each(images_ * pieces_, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t image = i / pieces_, piece = i % pieces_, first = image * pixels_of_image_;
        f(image, piece, first + piece * pixels_of_image_ / pieces_, first + (piece + 1) * pixels_of_image_ / pieces_);
      }
    });
  }

  ByteSteps steps_of(int64_t image) const {
    float low = 0.0f, high = 0.0f;
    for (int64_t piece = 0; piece < pieces_; ++piece) {
      const float* const range = ranges_ + 2 * (image * pieces_ + piece);
      if (range[0] != range[0] || range[1] != range[1]) return dispatch().images.steps(range[0], range[1]);
      low = std::min(low, range[0]), high = std::max(high, range[1]);
    }
    return dispatch().images.steps(low, high);
  }

  Matrix pixels_;
  int64_t images_, pixels_of_image_, channels_, pieces_;
  Workspace memory_;
  uint8_t* bytes_;
  float* ranges_;
  ByteSteps* steps_;
};

}  // namespace hfca
