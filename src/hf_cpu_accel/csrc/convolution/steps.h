//|| step.size.columns > 1// Steps of the op `convolutions`, as its layout has them, what is asked of them, and who reads what they make.
#pragma once
#include <algorithm>
#include <limits>
#include <vector>

#include "../tensors.h"
#include "arguments.h"
#include "chain.h"
#include "channel_steps.h"

namespace hfca {

// One row of the layout of `convolutions`. With a range its output is an image in bytes.
struct ChainStep : StepLayout {
  bool is(StepKind of) const { return kind == static_cast<int64_t>(of); }
  bool pools() const { return is(StepKind::max_pooling) || is(StepKind::average_pooling) || is(StepKind::average_pooling_within); }
  // On images of that size.
  Window window(const char* op, const Images& source) const {
    return {side(op, &SidesLayout::rows, source.height), side(op, &SidesLayout::columns, source.width)};
  }
  // Pixels beside the image that windows may reach.
  int64_t border() const { return std::max(border_of(&SidesLayout::rows), border_of(&SidesLayout::columns)); }

 private:
  using Side = int64_t SidesLayout::*;
  static constexpr int64_t same = -1;  // of `more`: as many zeros as same_padding of ops/chain/reference.py says

  WindowSide side(const char* op, Side of, int64_t pixels) const {
    constexpr int64_t most = 1 << 20;
    WindowSide found = side_of(op, size.*of, stride.*of, padding.*of, dilation.*of);
    STD_TORCH_CHECK(more.*of >= same && more.*of <= most, "hf_cpu_accel::", op, ": further padding must not be negative");
    found.more = more.*of;
    if (found.more != same) return found;
    const int64_t outputs = (pixels + found.stride - 1) / found.stride;
    const int64_t zeros = std::max((outputs - 1) * found.stride + found.dilation * (found.size - 1) + 1 - pixels, int64_t{0});
    found.padding = zeros / 2, found.more = zeros % 2;
    return found;
  }
  int64_t border_of(Side of) const { return more.*of == same ? (size.*of - 1) * dilation.*of : padding.*of + more.*of; }
};

constexpr size_t step_numbers = sizeof(ChainStep) / sizeof(int64_t);
constexpr float largest_end = 1e37f;  // of a range: its length is finite

inline void check_pooling(const char* op, const ChainStep& step, const Images& source, const Window& window) {
  // Each window then has a pixel of the image.
  STD_TORCH_CHECK(source.height > 0 && source.width > 0, "hf_cpu_accel::", op, ": a pooling needs an image with rows and columns");
  const auto fits = [](const WindowSide& side) { return 2 * side.padding <= side.size && side.dilation == 1 && side.more == 0; };
  const bool alone = step.out_channels == source.channels && step.residual < 0 && step.activation == 0 && step.range < 0;
  STD_TORCH_CHECK(
      alone && fits(window.rows) && fits(window.columns), "hf_cpu_accel::", op,
      ": a pooling has the channels of its input, no residual, range, activation or dilation, and at most half a window of padding");
}

// Whether a convolution of images in bytes is computed directly, where these have the border that it wants.
inline bool may_be_direct(const char* op, const Tensor& weight) {
  return has_direct_convolutions() && kind_of(weight, op) == WeightKind::int8_image;
}

// `border`, or none where the places of the images would not be known by an int32, or most of them were border.
inline int64_t fitting_border(Images images, int64_t border) {
  constexpr int64_t most = 16;
  images.border = border;
  return border <= most && images.spare_place() < std::numeric_limits<int32_t>::max() ? border : 0;
}

// Who reads the images of a chain, and how: 0 is the input, i + 1 the output of step i.
struct Readers {
  std::vector<size_t> last;
  std::vector<Wanted> wanted;
  bool dense_input = false;  // all channels of a pixel of it together
};

template <class Part>
Readers readers_of(const char* op, const ChainStep* steps, size_t count, int64_t channels, const Part& part) {
  Readers readers{std::vector<size_t>(count + 1, count), std::vector<Wanted>(count + 1)};
  std::vector<bool> bordered(count + 1);  // whether it may have a border
  for (size_t i = 0; i < count; ++i) {
    const ChainStep& step = steps[i];
    const auto number = static_cast<int64_t>(i);
    STD_TORCH_CHECK(step.source >= 0 && step.source <= number && step.residual <= number, "hf_cpu_accel::", op, ": step ", number,
                    " reads images that are not made before it");
    for (const int64_t place : {step.source, step.residual})
      if (place >= 0) readers.last[static_cast<size_t>(place)] = i;
    readers.dense_input |= step.residual == 0;
    const auto source = static_cast<size_t>(step.source);
    if (!step.is(StepKind::convolution)) {
      readers.dense_input |= step.source == 0;
      for (const int64_t place : {step.source, step.residual})
        if (place >= 0) bordered[static_cast<size_t>(place)] = false;
      continue;
    }
    STD_TORCH_CHECK(step.weight >= 0, "hf_cpu_accel::", op, ": step ", number, " has no weight");
    const auto weight = part(step.weight);
    bordered[i + 1] = step.range >= 0 && !is_winograd(*weight);
    if (!may_be_direct(op, *weight)) bordered[source] = false;
    if (is_winograd(*weight) && step.residual >= 0) bordered[static_cast<size_t>(step.residual)] = false;
    readers.wanted[source].border = std::max(readers.wanted[source].border, step.border());
    const WeightKind kind = kind_of(*weight, op);
    const bool several = step.size.rows > 1 || step.size.columns > 1;
    readers.dense_input |= step.source == 0 && (is_winograd(*weight) || !gathers(kind, channels, several));
    if (kind != WeightKind::int8_image) continue;
    Wanted& of = readers.wanted[source];
    of.steps = true, of.bytes |= several;
  }
  for (size_t i = 0; i <= count; ++i)
    if (!bordered[i]) readers.wanted[i].border = 0;
  for (size_t i = 0; i < count; ++i)  // the others do not see the range of what they make
    readers.wanted[i + 1].steps &= steps[i].is(StepKind::convolution) || steps[i].is(StepKind::max_pooling);
  return readers;
}

// What numbers of that range, [low, high], become bytes with.
inline ByteSteps known_steps(const char* op, const Tensor& range) {
  const bool two = range.scalar_type() == ScalarType::Float && range.is_contiguous() && sizes_of(range) == std::vector<int64_t>{2};
  const float* const ends = two ? static_cast<const float*>(range.const_data_ptr()) : nullptr;
  const bool fits = ends && ends[0] <= 0.0f && ends[1] >= 0.0f && ends[0] >= -largest_end && ends[1] <= largest_end;
  STD_TORCH_CHECK(fits, "hf_cpu_accel::", op, ": a range must be two finite float32 numbers, with 0 between them");
  return dispatch().kernels.images.steps_of_known(ends[0], ends[1]);
}

// The weight of a convolution in groups, [pixels of the window, channels of a group, channels].
inline const float* grouped_weight(const char* op, const ChainStep& step, const Images& source, const Tensor& weight) {
  const bool shaped = weight.scalar_type() == ScalarType::Float && weight.is_contiguous() && weight.dim() == 3;
  const bool fits = shaped && weight.size(0) == step.size.rows * step.size.columns && weight.size(2) == source.channels &&
                    weight.size(1) > 0 && source.channels % weight.size(1) == 0;
  STD_TORCH_CHECK(fits && step.out_channels == source.channels, "hf_cpu_accel::", op, ": the weight of groups is float32 [",
                  step.size.rows * step.size.columns, ", channels of a group, ", source.channels,
                  "], and there are as many output channels");
  return static_cast<const float*>(weight.const_data_ptr());
}

// Of steps that take pixel by pixel.
inline void check_no_window(const char* op, const Window& window) {
  const auto plain = [](const WindowSide& side) { return side.size == 1 && side.stride == 1 && side.padding == 0 && side.more == 0; };
  STD_TORCH_CHECK(plain(window.rows) && plain(window.columns), "hf_cpu_accel::", op, ": such a step takes pixel by pixel");
}

// Which channels a step that moves them makes its own of.
inline std::vector<ChannelRun> moved_channels(const char* op, const ChainStep& step, const Images& source, const Images* other,
                                              const OptionalTensor& numbers, const Window& window) {
  check_no_window(op, window);
  const bool fits = numbers && numbers->scalar_type() == ScalarType::Int && numbers->is_contiguous() &&
                    sizes_of(*numbers) == std::vector<int64_t>{step.out_channels} && step.activation == 0;
  STD_TORCH_CHECK(fits, "hf_cpu_accel::", op, ": the numbers of moved channels are int32, as many as the output has");
  const bool alike = !other || (other->count == source.count && other->height == source.height && other->width == source.width);
  STD_TORCH_CHECK(alike, "hf_cpu_accel::", op, ": images whose channels are put together must have the same size");
  const int64_t channels = source.channels + (other ? other->channels : 0);
  const auto* const values = static_cast<const int32_t*>(numbers->const_data_ptr());
  for (int64_t c = 0; c < step.out_channels; ++c)
    STD_TORCH_CHECK(values[c] >= 0 && values[c] < channels, "hf_cpu_accel::", op, ": there is no channel ", values[c], " of ", channels);
  return channel_runs(values, step.out_channels, source.channels);
}

// Of a step that multiplies and shifts channels: what by, [channels].
inline const float* channel_vector(const char* op, const char* name, const ChainStep& step, const Images& source,
                                   const OptionalTensor& part) {
  const bool fits =
      part && part->scalar_type() == ScalarType::Float && part->is_contiguous() && sizes_of(*part) == std::vector<int64_t>{source.channels};
  STD_TORCH_CHECK(fits && step.out_channels == source.channels, "hf_cpu_accel::", op, ": the ", name,
                  " of an affine step is float32, one number for each of the ", source.channels, " channels of its input");
  return static_cast<const float*>(part->const_data_ptr());
}

// Of sums and products: the other image, which may be none.
inline void check_other(const char* op, const ChainStep& step, const Images& source, const Images* other, const Window& window) {
  check_no_window(op, window);
  STD_TORCH_CHECK(other || !step.is(StepKind::product), "hf_cpu_accel::", op, ": a product is one of two images");
  STD_TORCH_CHECK(step.out_channels == source.channels, "hf_cpu_accel::", op, ": such a step keeps the channels of its input");
  if (!other) return;
  const bool same = other->height == source.height && other->width == source.width, one = other->height == 1 && other->width == 1;
  STD_TORCH_CHECK(other->count == source.count && other->channels == source.channels && (same || one), "hf_cpu_accel::", op,
                  ": the other image must have the shape of the first, or one pixel");
}

}  // namespace hfca
