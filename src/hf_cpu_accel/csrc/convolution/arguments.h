// From the arguments of convolutions to images and GEMMs.
#pragma once
#include <limits>
#include <vector>

#include "../gemm/arguments.h"
#include "images.h"
#include "patches.h"
#include "winograd.h"

namespace hfca {

// How the window of a convolution moves.
struct Window {
  WindowSide rows, columns;

  int64_t pixels() const { return rows.size * columns.size; }
};

// Whether that is the weight of a Winograd convolution (winograd.h), [panels, 4, 4, words, panel_columns, values of a word].
inline bool is_winograd(const Tensor& weight) { return weight.dim() == 6; }

inline Gemm gemm_of_winograd(const char* op, int64_t n, int64_t channels, const Window& window, const Tensor& weight,
                             const OptionalTensor& scale, const OptionalTensor& bias, Activation activation) {
  const auto by_pixels = [](const WindowSide& side) { return side.size == 3 && side.stride == 1 && side.dilation == 1 && side.more == 0; };
  STD_TORCH_CHECK(by_pixels(window.rows) && by_pixels(window.columns), "hf_cpu_accel::", op,
                  ": a weight for tiles needs kernel_size 3, stride 1 and dilation 1");
  Gemm g;
  g.n = n, g.k = channels, g.kind = kind_of(weight, op), g.activation = activation;
  STD_TORCH_CHECK(weight.scalar_type() != ScalarType::Byte && n > 0 && channels > 0, "hf_cpu_accel::", op,
                  ": a weight for tiles is float32, bfloat16 or int8 and has input and output channels");
  const int64_t per_word = 4 / static_cast<int64_t>(weight.element_size());
  const std::vector<int64_t> packed{
      (n + panel_columns - 1) / panel_columns, tile_side, tile_side, channels / per_word, panel_columns, per_word};
  STD_TORCH_CHECK(weight.is_contiguous() && channels % 32 == 0 && sizes_of(weight) == packed, "hf_cpu_accel::", op,
                  ": the packed weight for tiles does not fit ", channels, " input and ", n, " output channels");
  g.weight = weight.const_data_ptr();
  if (per_word == 4) {
    STD_TORCH_CHECK(channels <= max_integer_features, "hf_cpu_accel::", op, ": integer sums of more than ", max_integer_features,
                    " channels would overflow");
    const std::vector<int64_t> scales{2, tile_positions, n};
    STD_TORCH_CHECK(scale && scale->scalar_type() == ScalarType::Float && scale->is_contiguous() && sizes_of(*scale) == scales,
                    "hf_cpu_accel::", op, ": an integer weight for tiles needs float32 scales and sums [2, ", tile_positions, ", ", n, "]");
    g.weight_scale = static_cast<const float*>(scale->const_data_ptr());
    g.weight_sum = g.weight_scale + tile_positions * n;
  }
  g.bias = as_vector(bias, n, op, "bias");
  return g;
}

// Without its rows.
inline Gemm gemm_of_convolution(const char* op, int64_t n, int64_t channels, const Window& window, const Tensor& weight,
                                const OptionalTensor& scale, const OptionalTensor& bias, Activation activation) {
  if (is_winograd(weight)) return gemm_of_winograd(op, n, channels, window, weight, scale, bias, activation);
  return gemm_of(op, 0, n, window.pixels() * channels, weight, scale, bias, activation, window.pixels());
}

inline WindowSide side_of(const char* op, int64_t size, int64_t stride, int64_t padding, int64_t dilation) {
  constexpr int64_t most = 1 << 20;  // keeps all positions far within an int64
  const WindowSide found{size, stride, padding, dilation, 0};
  STD_TORCH_CHECK(found.size >= 1 && found.stride >= 1 && found.padding >= 0 && found.dilation >= 1 && found.size <= most &&
                      found.stride <= most && found.padding <= most && found.dilation <= most,
                  "hf_cpu_accel::", op, ": kernel_size, stride and dilation must be positive and padding not negative");
  return found;
}

// The patches of a convolution of images, but for where these are.
inline Patches patches_of(const char* op, const Images& images, const Window& window) {
  Patches patches;
  patches.height = images.height, patches.width = images.width;
  patches.rows = window.rows, patches.columns = window.columns;
  patches.out_height = patches.rows.outputs(patches.height), patches.out_width = patches.columns.outputs(patches.width);
  STD_TORCH_CHECK(patches.out_height > 0 && patches.out_width > 0, "hf_cpu_accel::", op, ": the window is larger than the padded input of ",
                  patches.height, " x ", patches.width);
  int64_t bytes = images.count;  // of all that windows see
  bool overflow = false;
  for (const int64_t size : {patches.rows.reach(patches.out_height), patches.columns.reach(patches.out_width), images.channels, int64_t{4}})
    overflow |= __builtin_mul_overflow(bytes, size, &bytes);
  STD_TORCH_CHECK(!overflow, "hf_cpu_accel::", op, ": a padded input of so many elements does not exist");
  return patches;
}

// dense: in that order, else as it lies.
inline Images images_of(const char* op, const char* name, const Tensor& tensor, Tensor& keep, bool dense = true) {
  check_floating(tensor, op, name);
  STD_TORCH_CHECK(tensor.dim() == 4, "hf_cpu_accel::", op, ": ", name, " must be [batch, height, width, channels]");
  Images images = Images::dense({nullptr, tensor.size(3), is_bf16(tensor)}, tensor.size(0), tensor.size(1), tensor.size(2), tensor.size(3));
  if (dense) images = Images::dense(as_rows(tensor, keep), images.count, images.height, images.width, images.channels);
  else
    images.pixels.data = tensor.mutable_data_ptr(), images.apart = {tensor.stride(0), tensor.stride(1), tensor.stride(2), tensor.stride(3)};
  return images;
}

inline Tensor empty_images(const Images& images, ScalarType dtype) {
  return empty_of({images.count, images.height, images.width, images.channels}, dtype, dtype == ScalarType::Float ? 4 : 2);
}

// What g makes of `input`, without the memory.
inline Images output_of(const char* op, const Images& input, const Patches& patches, const Gemm& g, ScalarType dtype,
                        const ByteSteps* bytes = nullptr) {
  int64_t count = input.count;
  bool overflow = g.n < 0;
  for (const int64_t size : {patches.out_height, patches.out_width, g.n, int64_t{4}})
    overflow |= __builtin_mul_overflow(count, size, &count);
  STD_TORCH_CHECK(!overflow, "hf_cpu_accel::", op, ": an output of so many elements does not exist");
  const Matrix pixels{nullptr, g.n, dtype == ScalarType::BFloat16, nullptr, bytes};
  return Images::dense(pixels, input.count, patches.out_height, patches.out_width, g.n);
}

// g with its rows, what is added and where they go.
inline Gemm with_images(const char* op, Gemm g, const Images& output, const Images* residual, bool by_winograd) {
  g.m = output.count * output.height * output.width;
  STD_TORCH_CHECK(!by_winograd || g.m <= std::numeric_limits<int32_t>::max(), "hf_cpu_accel::", op, ": an output of ", g.m,
                  " pixels is too large for a weight for tiles");
  if (residual) {
    const auto shape = [](const Images& of) { return std::vector<int64_t>{of.count, of.height, of.width, of.channels}; };
    STD_TORCH_CHECK(shape(*residual) == shape(output), "hf_cpu_accel::", op, ": residual must have the output's shape");
    g.residual = residual->pixels, g.activates_sum = true;
  }
  g.write_to(output.pixels);
  return g;
}

}  // namespace hfca
