// conv2d: activation(convolution + bias + residual); convolutions: several of them in one call. Schemas, checks, calls.
#include <limits>
#include <memory>
#include <vector>

#include "convolution/arguments.h"
#include "convolution/driver.h"
#include "convolution/winograd_driver.h"
#include "tensors.h"

namespace hfca {
namespace {

WindowSide side_of(const char* op, int64_t size, int64_t stride, int64_t padding, int64_t dilation) {
  constexpr int64_t most = 1 << 20;  // keeps all positions far within an int64
  const WindowSide found{size, stride, padding, dilation};
  STD_TORCH_CHECK(found.size >= 1 && found.stride >= 1 && found.padding >= 0 && found.dilation >= 1 && found.size <= most && found.stride <= most &&
                      found.padding <= most && found.dilation <= most,
                  "hf_cpu_accel::", op, ": kernel_size, stride and dilation must be positive and padding not negative");
  return found;
}

// activation(convolution + bias + residual) of g, whose weight side is filled in but for the numbers of rows and input features. bytes:
// of the input; null before they are made.
Tensor convolve(const char* op, const Tensor& input, Gemm g, const Window& window, bool tiled, const Tensor* residual, ScalarType dtype,
                std::unique_ptr<ByteImages>& bytes) {
  check_floating(input, op, "input");
  Patches patches;
  patches.height = input.size(1), patches.width = input.size(2);
  patches.rows = window.rows, patches.columns = window.columns;
  patches.out_height = patches.rows.outputs(patches.height), patches.out_width = patches.columns.outputs(patches.width);
  STD_TORCH_CHECK(patches.out_height > 0 && patches.out_width > 0, "hf_cpu_accel::", op, ": the window is larger than the padded input of ",
                  patches.height, " x ", patches.width);
  g.m = input.size(0) * patches.out_height * patches.out_width;
  const int64_t channels = input.size(3), element = static_cast<int64_t>(input.element_size());
  Tensor output = empty_of({input.size(0), patches.out_height, patches.out_width, g.n}, dtype, dtype == ScalarType::Float ? 4 : 2);
  Tensor keep_input = input, keep_residual = input;
  g.input = as_rows(input, keep_input);
  patches.data = static_cast<const char*>(g.input.data);
  patches.pixel_bytes = g.input.stride * element, patches.channel_bytes = channels * element;
  if (residual) {
    check_floating(*residual, op, "residual");
    STD_TORCH_CHECK(sizes_of(*residual) == sizes_of(output), "hf_cpu_accel::", op, ": residual must have the output's shape");
    g.residual = as_rows(*residual, keep_residual), g.activates_sum = true;
  }
  g.write_to({output.mutable_data_ptr(), g.n, is_bf16(output)});
  if (output.numel() == 0) return output;
  if (tiled) {
    STD_TORCH_CHECK(g.m <= std::numeric_limits<int32_t>::max(), "hf_cpu_accel::", op, ": an output of ", g.m, " pixels is too large for a weight for tiles");
    run_tiles(g, patches, input.size(0));
    return output;
  }
  const bool quantised = g.kind == WeightKind::int8_image, made = bytes != nullptr;
  if (quantised && !made)
    bytes = std::make_unique<ByteImages>(g.input, input.size(0), patches.height * patches.width, channels, team_size(multiply_adds(g)));
  run_patches(g, patches, quantised ? bytes.get() : nullptr, made);
  return output;
}

Tensor conv2d(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& scale, const std::optional<Tensor>& bias,
              const std::optional<Tensor>& residual, int64_t out_channels, const std::vector<int64_t>& kernel_size, const std::vector<int64_t>& stride,
              const std::vector<int64_t>& padding, const std::vector<int64_t>& dilation, const std::string& activation) {
  constexpr const char* op = "conv2d";
  STD_TORCH_CHECK(input.dim() == 4, "hf_cpu_accel::", op, ": input must be [batch, height, width, channels]");
  STD_TORCH_CHECK(kernel_size.size() == 2 && stride.size() == 2 && padding.size() == 2 && dilation.size() == 2, "hf_cpu_accel::", op,
                  ": kernel_size, stride, padding and dilation must have two numbers each");
  const Window window{side_of(op, kernel_size[0], stride[0], padding[0], dilation[0]), side_of(op, kernel_size[1], stride[1], padding[1], dilation[1])};
  const Gemm g = gemm_of_convolution(op, out_channels, input.size(3), window, weight, scale, bias, activation_of(activation, op));
  std::unique_ptr<ByteImages> bytes;
  return convolve(op, input, g, window, is_of_tiles(weight), residual ? &*residual : nullptr, input.scalar_type(), bytes);
}

// One row of the layout of `convolutions`, as ops/convolutions.py writes it.
struct Step {
  int64_t weight, scale, bias, source, residual, out_channels, activation, size[2], stride[2], padding[2], dilation[2];
};
constexpr size_t step_numbers = sizeof(Step) / sizeof(int64_t);

Tensor convolutions(const Tensor& input, const std::vector<Tensor>& parts, const std::vector<int64_t>& layout, bool narrow) {
  constexpr const char* op = "convolutions";
  STD_TORCH_CHECK(input.dim() == 4, "hf_cpu_accel::", op, ": input must be [batch, height, width, channels]");
  STD_TORCH_CHECK(!layout.empty() && layout.size() % step_numbers == 0, "hf_cpu_accel::", op, ": layout must have ", step_numbers, " numbers per step");
  const size_t count = layout.size() / step_numbers;
  const ScalarType between = narrow ? ScalarType::BFloat16 : input.scalar_type();
  const auto part = [&](int64_t place) -> std::optional<Tensor> {
    STD_TORCH_CHECK(place >= -1 && place < static_cast<int64_t>(parts.size()), "hf_cpu_accel::", op, ": there is no part ", place);
    return place < 0 ? std::nullopt : std::optional<Tensor>(parts[static_cast<size_t>(place)]);
  };
  std::vector<Tensor> images{input};  // and then the output of each step
  images.reserve(count + 1);
  std::vector<std::unique_ptr<ByteImages>> bytes(count + 1);  // of those that were read in 8 bits
  std::vector<size_t> last_reader(count + 1, count);
  const auto steps = reinterpret_cast<const Step*>(layout.data());
  const auto image = [&](int64_t place) -> const Tensor& {
    STD_TORCH_CHECK(place >= 0 && place < static_cast<int64_t>(images.size()), "hf_cpu_accel::", op, ": there is no image ", place);
    return images[static_cast<size_t>(place)];
  };
  for (size_t i = 0; i < count; ++i)
    for (const int64_t place : {steps[i].source, steps[i].residual})
      if (place >= 0 && place <= static_cast<int64_t>(i)) last_reader[static_cast<size_t>(place)] = i;
  for (size_t i = 0; i < count; ++i) {
    const Step& step = steps[i];
    STD_TORCH_CHECK(step.activation >= 0 && step.activation < activations, "hf_cpu_accel::", op, ": unknown activation ", step.activation);
    const auto weight = part(step.weight);
    STD_TORCH_CHECK(weight, "hf_cpu_accel::", op, ": a step needs a weight");
    const Tensor& source = image(step.source);
    const Window window{side_of(op, step.size[0], step.stride[0], step.padding[0], step.dilation[0]),
                        side_of(op, step.size[1], step.stride[1], step.padding[1], step.dilation[1])};
    const auto scale = part(step.scale), bias = part(step.bias);
    const Gemm g = gemm_of_convolution(op, step.out_channels, source.size(3), window, *weight, scale, bias, static_cast<Activation>(step.activation));
    const ScalarType dtype = i + 1 == count ? input.scalar_type() : between;
    images.push_back(convolve(op, source, g, window, is_of_tiles(*weight), step.residual < 0 ? nullptr : &image(step.residual), dtype, bytes[static_cast<size_t>(step.source)]));
    for (const int64_t place : {step.source, step.residual}) {  // read for the last time: its memory is for the next outputs
      if (place < 0 || last_reader[static_cast<size_t>(place)] != i) continue;
      bytes[static_cast<size_t>(place)].reset();
      if (place > 0) images[static_cast<size_t>(place)] = input;
    }
  }
  return images.back();
}

}  // namespace
}  // namespace hfca

STABLE_TORCH_LIBRARY_FRAGMENT(hf_cpu_accel, m) {
  m.def(
      "conv2d(Tensor input, Tensor weight, Tensor? scale, Tensor? bias, Tensor? residual, SymInt out_channels, int[] kernel_size, "
      "int[] stride, int[] padding, int[] dilation, str activation) -> Tensor");
  m.def("convolutions(Tensor input, Tensor[] parts, int[] layout, bool narrow) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(hf_cpu_accel, CPU, m) {
  m.impl("conv2d", TORCH_BOX(&hfca::conv2d));
  m.impl("convolutions", TORCH_BOX(&hfca::convolutions));
}
