// The input of a convolution in int8: each image quantized over the range of all its values. Where windows share pixels, each image is turned
// into bytes once, and patches then are bytes that lie in it; where they do not, pixels become bytes as they are packed.
#pragma once
#include <algorithm>

#include "../dispatch.h"
#include "../team.h"
#include "../workspace.h"
#include "patches.h"

namespace hfca {

class QuantizedImages {
 public:
  // pixels: of all images, `images` of `pixels_of_image`. in_bytes: some convolution wants the bytes. seen: the range of the only image, which
  // others have seen while they made it, for `threads` threads (Gemm::range); null where they have not.
  QuantizedImages(const Matrix& pixels, int64_t images, int64_t pixels_of_image, int64_t channels, int64_t threads, bool in_bytes,
                  const float* seen)
      : pixels_(pixels),
        images_(images),
        pixels_of_image_(pixels_of_image),
        channels_(channels),
        pieces_(threads),
        byte_count_(in_bytes ? (images * pixels_of_image + images) * channels : 0),
        seen_(seen) {}

  size_t memory() const {
    return Workspace::size_of<uint8_t>(byte_count_) + Workspace::size_of<float>(2 * images_ * pieces_) +
           Workspace::size_of<ByteSteps>(images_);
  }
  void take(Workspace& from) {
    bytes_ = from.take<uint8_t>(byte_count_);
    ranges_ = from.take<float>(2 * images_ * pieces_);
    steps_ = from.take<ByteSteps>(images_);
  }

  // The pixels are there from now on.
  void read(void* pixels) { pixels_.data = pixels; }

  // The patches of these images instead of those that they are made of.
  Patches patches(Patches of) const {
    of.data = reinterpret_cast<const char*>(bytes_);
    of.pixel_bytes = of.channel_bytes = of.zeros_apart = channels_;
    of.zeros = of.data + images_ * pixels_of_image_ * channels_;
    return of;
  }

  // Everything that convolutions want of them, once.
  void make(const Team& team) const {
    if (!seen_)
      each_piece(team, [&](int64_t image, int64_t piece, int64_t begin, int64_t end) {
        dispatch().kernels.images.range(pixels_, channels_, begin, end, ranges_ + 2 * (image * pieces_ + piece));
      });
    each_piece(team, [&](int64_t image, int64_t piece, int64_t begin, int64_t end) {
      const ByteSteps steps = steps_of(image);
      if (piece == 0) steps_[image] = steps;
      if (byte_count_ == 0) return;
      dispatch().kernels.images.quantize(pixels_, channels_, begin, end, steps, bytes_ + begin * channels_);
      if (piece == 0) std::fill_n(bytes_ + (images_ * pixels_of_image_ + image) * channels_, channels_, static_cast<uint8_t>(steps.zero));
    });
  }

  const ByteSteps* steps() const { return steps_; }

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
    const auto add = [&](float least, float largest) {
      if (least < low || least != least) low = least;
      if (largest > high || largest != largest) high = largest;
      return low == low && high == high;  // NaN stays
    };
    for (int64_t piece = 0; piece < pieces_; ++piece) {
      const float* const range = seen_ ? seen_ + piece * range_numbers : ranges_ + 2 * (image * pieces_ + piece);
      const int64_t lanes = seen_ ? range_numbers / 2 : 1;
      for (int64_t lane = 0; lane < lanes; ++lane)
        if (!add(range[lane], range[lanes + lane])) return dispatch().kernels.images.steps(low, high);
    }
    return dispatch().kernels.images.steps(low, high);
  }

  Matrix pixels_;
  int64_t images_, pixels_of_image_, channels_, pieces_, byte_count_;
  const float* seen_;
  uint8_t* bytes_ = nullptr;
  float* ranges_ = nullptr;
  ByteSteps* steps_ = nullptr;
};

}  // namespace hfca
