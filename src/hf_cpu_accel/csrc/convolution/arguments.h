// From the arguments of convolutions to the weight side of their GEMM.
#pragma once
#include "../gemm/arguments.h"
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
  const auto by_pixels = [](const WindowSide& side) { return side.size == 3 && side.stride == 1 && side.dilation == 1; };
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

}  // namespace hfca
