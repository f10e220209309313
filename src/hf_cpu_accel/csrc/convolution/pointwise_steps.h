// Steps of a chain that are no products of matrices, by the kernels of pointwise.h and, for poolings, gather.h: convolutions in groups,
// means of images, sums and products of two, norms and poolings.
#pragma once
#include <algorithm>
#include <cstring>

#include "../dispatch.h"
#include "image_work.h"

namespace hfca {

// Pixels of the input of an op may be further apart than they have channels.
inline int64_t bytes_apart(const Images& images) { return images.pixels.stride * images.element_bytes(); }

// A convolution in groups of few channels (Xie et al. 2017, arXiv:1611.05431), most often of one (Howard et al. 2017, arXiv:1704.04861).
class GroupedConvolution final : public ImageWork {
 public:
  // weight: [rows of the window][columns][channels of a group][channels]; bias: [channels].
  GroupedConvolution(const WorkImages& images, int64_t group, const float* weight, const float* bias, Activation activation)
      : source_(images.source), output_(images.output), patches_(images.patches), weight_(weight) {
    const WindowSide& columns = patches_.columns;
    row_.input_bf16 = source_.pixels.bf16, row_.output_bf16 = output_.pixels.bf16;
    row_.pixel_apart = source_.pixels.stride, row_.row_apart = patches_.rows.dilation * source_.width * source_.pixels.stride;
    row_.bias = bias, row_.activation = activation, row_.channels = source_.channels, row_.group = group;
    row_.size = columns.size, row_.stride = columns.stride, row_.padding = columns.padding, row_.dilation = columns.dilation;
    row_.width = source_.width, row_.out_width = output_.width;
  }

  void run(const Team& team) const override {
    // Rows are cut into parts of channels where there are too few of them to be shared evenly.
    constexpr int64_t least = 64, enough = 32;
    const int64_t rows = output_.count * output_.height, channels = source_.channels;
    const int64_t parts = rows >= enough ? 1 : std::max(channels / least, int64_t{1});
    team.each(rows * parts, [&](int64_t begin, int64_t end) {
      GroupedRow row = row_;
      for (int64_t i = begin; i < end; ++i) {
        const int64_t part = i % parts;
        row.begin = part * least, row.end = part + 1 < parts ? row.begin + least : channels;
        compute(row, i / parts);
      }
    });
  }

 private:
  void compute(GroupedRow& row, int64_t number) const {
    const WindowSide& side = patches_.rows;
    const int64_t image = number / output_.height, y = number % output_.height * side.stride - side.padding;
    const int64_t above = y < 0 ? (-y + side.dilation - 1) / side.dilation : 0;  // rows of the window above the image
    const int64_t within = (source_.height - y + side.dilation - 1) / side.dilation;
    row.rows = std::max(std::min(side.size, within) - above, int64_t{0});
    const int64_t first = (image * source_.height + y + above * side.dilation) * source_.width * source_.pixels.stride;
    row.input = static_cast<const char*>(source_.pixels.data) + first * source_.element_bytes();
    row.weight = weight_ + above * row.size * row.group * row.channels;
    row.output = static_cast<char*>(output_.pixels.data) + number * output_.width * output_.pixel_bytes();
    dispatch().kernels.pointwise.grouped(row);
  }

  Images source_, output_;
  Patches patches_;
  const float* weight_;
  GroupedRow row_{};
};

// The mean of each channel over all pixels of an image.
class ChannelMeans final : public ImageWork {
 public:
  explicit ChannelMeans(const WorkImages& images) : source_(images.source), output_(images.output) {}

  // Each thread adds some pixels of an image.
  size_t bytes(int64_t threads) const override { return Workspace::size_of<float>(threads * source_.count * apart()); }
  void take(Workspace& from, int64_t threads) override { threads_ = threads, sums_ = from.take<float>(threads * source_.count * apart()); }

  void run(const Team& team) const override {
    const PointwiseKernels& kernels = dispatch().kernels.pointwise;
    const int64_t pixels = source_.height * source_.width, channels = source_.channels;
    team.each(threads_ * source_.count, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t image = i / threads_, part = i % threads_;
        const int64_t first = part * pixels / threads_, last = (part + 1) * pixels / threads_;
        const char* const from = static_cast<const char*>(source_.pixels.data) + (image * pixels + first) * bytes_apart(source_);
        float* const sums = sums_ + i * apart();
        std::memset(sums, 0, static_cast<size_t>(channels) * sizeof(float));
        kernels.add_pixels(from, source_.pixels.bf16, last - first, source_.pixels.stride, channels, sums);
      }
    });
    team.each(source_.count, [&](int64_t begin, int64_t end) {
      for (int64_t image = begin; image < end; ++image) {
        float* const sums = sums_ + image * threads_ * apart();
        kernels.add_pixels(sums + apart(), false, threads_ - 1, apart(), channels, sums);
        kernels.scale(sums, 1.0f / static_cast<float>(pixels), channels,
                      static_cast<char*>(output_.pixels.data) + image * output_.pixel_bytes(), output_.pixels.bf16);
      }
    });
  }

 private:
  int64_t apart() const { return (source_.channels + 15) / 16 * 16; }

  Images source_, output_;
  int64_t threads_ = 0;
  float* sums_ = nullptr;
};

// An activation of an image, of its sum with another one, or of its product with one. The other one may have one pixel, for all pixels of an
// image.
class CombinedImages final : public ImageWork {
 public:
  CombinedImages(const WorkImages& images, bool product, Activation activation) : source_(images.source), output_(images.output) {
    part_.input_bf16 = source_.pixels.bf16, part_.output_bf16 = output_.pixels.bf16;
    part_.channels = source_.channels, part_.product = product, part_.activation = activation;
    is_dense_ = source_.pixels.stride == source_.channels;
    if (!images.other) return;
    other_ = images.other->pixels.data, part_.other_bf16 = images.other->pixels.bf16, other_bytes_ = bytes_apart(*images.other);
    is_dense_ &= images.other->pixels.stride == source_.channels;
    is_one_ = images.other->height * images.other->width == 1 && source_.height * source_.width > 1;
  }

  void run(const Team& team) const override {
    const int64_t pixels = source_.height * source_.width, parts = is_one_ ? source_.count : 1;
    const int64_t pixels_of_part = pixels * source_.count / parts;
    team.each(pixels * source_.count, [&](int64_t begin, int64_t end) {
      while (begin < end) {  // of one image after another
        const int64_t part = begin / pixels_of_part, next = std::min(end, (part + 1) * pixels_of_part);
        if (is_dense_) compute(begin, next - begin, is_one_ ? part : begin);
        else
          for (int64_t i = begin; i < next; ++i) compute(i, 1, is_one_ ? part : i);
        begin = next;
      }
    });
  }

 private:
  void compute(int64_t first, int64_t pixels, int64_t other) const {
    CombinedPixels part = part_;
    part.input = static_cast<const char*>(source_.pixels.data) + first * bytes_apart(source_);
    part.output = static_cast<char*>(output_.pixels.data) + first * output_.pixel_bytes();
    part.other = other_ ? static_cast<const char*>(other_) + other * other_bytes_ : nullptr;
    part.other_apart = is_one_ ? 0 : part.channels, part.pixels = pixels;
    dispatch().kernels.pointwise.combine(part);
  }

  Images source_, output_;
  CombinedPixels part_{};
  const void* other_ = nullptr;
  int64_t other_bytes_ = 0;
  bool is_one_ = false, is_dense_ = true;
};

// A batch norm with fixed statistics (Ioffe and Szegedy 2015, arXiv:1502.03167) ahead of a convolution, and the activation between them.
class AffineImages final : public ImageWork {
 public:
  // gain, shift: [channels].
  AffineImages(const WorkImages& images, const float* gain, const float* shift, Activation activation)
      : source_(images.source), output_(images.output) {
    part_.input_bf16 = source_.pixels.bf16, part_.output_bf16 = output_.pixels.bf16;
    part_.channels = source_.channels, part_.apart = source_.pixels.stride;
    part_.gain = gain, part_.shift = shift, part_.activation = activation;
  }

  void run(const Team& team) const override {
    team.each(source_.count * source_.height * source_.width, [&](int64_t begin, int64_t end) {
      AffinePixels part = part_;
      part.input = static_cast<const char*>(source_.pixels.data) + begin * bytes_apart(source_);
      part.output = static_cast<char*>(output_.pixels.data) + begin * output_.pixel_bytes();
      part.pixels = end - begin;
      dispatch().kernels.pointwise.affine(part);
    });
  }

 private:
  Images source_, output_;
  AffinePixels part_{};
};

// What is made of a window: its zeros count for one kind of mean, and not for the other.
enum class Pooled { largest, mean, mean_within };

class Pooling final : public ImageWork {
 public:
  // The input's pixels are bytes if the output's are, which only the largest may be.
  Pooling(const WorkImages& images, Pooled kind)
      : output_(images.output), patches_(images.patches), input_bf16_(images.source.pixels.bf16), kind_(kind), range_(images.range) {}

  size_t bytes(int64_t threads) const override { return Workspace::size_of<const void*>(threads * patches_.pixels()); }
  void take(Workspace& from, int64_t threads) override { starts_ = from.take<const void*>(threads * patches_.pixels()); }

  void run(const Team& team) const override {
    const void** const starts = starts_ + team.slot() * patches_.pixels();
    float* const range = range_ ? range_ + team.slot() * range_numbers : nullptr;
    const int64_t pixel_bytes = output_.channels * output_.element_bytes();
    team.each(output_.count * output_.height * output_.width, [&](int64_t begin, int64_t end) {
      Patches::Place place = patches_.place_of(begin);
      char* to = static_cast<char*>(output_.pixels.data) + begin * pixel_bytes;
      const GatherKernels& pixels = dispatch().kernels.pixels;
      for (int64_t i = begin; i < end; ++i, patches_.advance(place), to += pixel_bytes) {
        const int64_t count = patches_.within(place, starts);
        if (kind_ != Pooled::largest) {
          const int64_t counted = kind_ == Pooled::mean ? patches_.pixels() : count;
          pixels.mean(starts, input_bf16_, count, output_.channels, 1.0f / static_cast<float>(counted), to, output_.pixels.bf16);
        } else if (output_.pixels.bytes) pixels.largest_bytes(starts, count, output_.channels, to);
        else pixels.largest(starts, input_bf16_, count, output_.channels, to, output_.pixels.bf16, range);
      }
    });
  }

 private:
  Images output_;
  Patches patches_;
  bool input_bf16_;
  Pooled kind_;
  float* range_;
  const void** starts_ = nullptr;
};

}  // namespace hfca
