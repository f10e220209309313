// A step of a chain that moves channels: those of one image, or of two beside each other, in another order, or only some of them.
#pragma once
#include <cstring>
#include <vector>

#include "../dispatch.h"
#include "image_work.h"

namespace hfca {

// Channels that follow one another in what is read and in what is made.
struct ChannelRun {
  bool other;  // of the second image
  int64_t from, to, count;
};

// numbers[c]: which channel of the two images beside each other is channel c of the output.
inline std::vector<ChannelRun> channel_runs(const int32_t* numbers, int64_t count, int64_t first_channels) {
  std::vector<ChannelRun> runs;
  for (int64_t c = 0; c < count; ++c) {
    const bool other = numbers[c] >= first_channels;
    const int64_t from = numbers[c] - (other ? first_channels : 0);
    if (!runs.empty() && runs.back().other == other && runs.back().from + runs.back().count == from) ++runs.back().count;
    else runs.push_back({other, from, c, 1});
  }
  return runs;
}

class MovedChannels final : public ImageWork {
 public:
  MovedChannels(const WorkImages& images, std::vector<ChannelRun> runs)
      : first_(images.source), second_(images.other ? *images.other : images.source), output_(images.output), runs_(std::move(runs)) {
    for (const ChannelRun& run : runs_) single_ &= run.count == 1;
  }

  void run(const Team& team) const override {
    team.each(output_.count * output_.height * output_.width, [&](int64_t begin, int64_t end) {
      const bool alike = first_.pixels.bf16 == output_.pixels.bf16 && second_.pixels.bf16 == output_.pixels.bf16;
      if (!alike) convert(begin, end);
      else if (output_.pixels.bf16) copy<uint16_t>(begin, end);
      else copy<uint32_t>(begin, end);
    });
  }

 private:
  template <class T>
  void copy(int64_t begin, int64_t end) const {
    const T* one = static_cast<const T*>(first_.pixels.data) + begin * first_.pixels.stride;
    const T* two = static_cast<const T*>(second_.pixels.data) + begin * second_.pixels.stride;
    T* to = static_cast<T*>(output_.pixels.data) + begin * output_.channels;
    for (int64_t i = begin; i < end; ++i, one += first_.pixels.stride, two += second_.pixels.stride, to += output_.channels) {
      if (single_)
        for (const ChannelRun& run : runs_) to[run.to] = (run.other ? two : one)[run.from];
      else
        for (const ChannelRun& run : runs_)
          std::memcpy(to + run.to, (run.other ? two : one) + run.from, static_cast<size_t>(run.count) * sizeof(T));
    }
  }

  // Where what is read and what is made are no numbers of one kind.
  void convert(int64_t begin, int64_t end) const {
    for (int64_t i = begin; i < end; ++i)
      for (const ChannelRun& run : runs_) {
        const Images& from = run.other ? second_ : first_;
        CombinedPixels part{};
        part.input = static_cast<const char*>(from.pixels.data) + (i * from.pixels.stride + run.from) * from.element_bytes();
        part.output = static_cast<char*>(output_.pixels.data) + (i * output_.channels + run.to) * output_.element_bytes();
        part.input_bf16 = from.pixels.bf16, part.output_bf16 = output_.pixels.bf16;
        part.pixels = 1, part.channels = run.count, part.activation = Activation::none;
        dispatch().kernels.pointwise.combine(part);
      }
  }

  Images first_, second_, output_;
  std::vector<ChannelRun> runs_;
  bool single_ = true;
};

}  // namespace hfca
