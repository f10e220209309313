// The largest pixel of each window, channel by channel, or the mean of its pixels.
#pragma once
#include "../dispatch.h"
#include "image_work.h"

namespace hfca {

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
