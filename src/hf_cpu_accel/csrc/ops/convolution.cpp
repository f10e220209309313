// conv2d: activation(convolution + bias + residual). Schema, checks, call.
#include <vector>

#include "../convolution/arguments.h"
#include "../convolution/chain.h"
#include "../tensors.h"

namespace hfca {
namespace {

Tensor conv2d(const Tensor& input, const Tensor& weight, const OptionalTensor& scale, const OptionalTensor& bias,
              const OptionalTensor& residual, int64_t out_channels, const std::vector<int64_t>& kernel_size,
              const std::vector<int64_t>& stride, const std::vector<int64_t>& padding, const std::vector<int64_t>& dilation,
              const Text& activation) {
  constexpr const char* op = "conv2d";
  Tensor keep_input = input, keep_residual = input;
  Images images = images_of(op, "input", input, keep_input, false);
  STD_TORCH_CHECK(kernel_size.size() == 2 && stride.size() == 2 && padding.size() == 2 && dilation.size() == 2, "hf_cpu_accel::", op,
                  ": kernel_size, stride, padding and dilation must have two numbers each");
  const Window window{side_of(op, kernel_size[0], stride[0], padding[0], dilation[0]),
                      side_of(op, kernel_size[1], stride[1], padding[1], dilation[1])};
  const Gemm g = gemm_of_convolution(op, out_channels, images.channels, window, weight, scale, bias, activation_of(activation, op));
  const bool by_winograd = is_winograd(weight);
  if (by_winograd || !gathers(g.kind, images.channels, window.pixels() > 1)) images = images_of(op, "input", input, keep_input);
  const Patches patches = patches_of(op, images, window);
  Images output = output_of(op, images, patches, g, input.scalar_type());
  Tensor made = empty_images(output, input.scalar_type());
  output.pixels.data = made.mutable_data_ptr();
  std::optional<Images> added;
  if (residual) added = images_of(op, "residual", *residual, keep_residual);
  const Gemm whole = with_images(op, g, output, added ? &*added : nullptr, by_winograd);
  if (made.numel() == 0) return made;
  ConvolutionChain chain(team_size(multiply_adds(whole) * (by_winograd ? 4 : 1)), 1);
  const size_t source = chain.add(images, {true, patches.have_several_pixels()});
  chain.convolve(whole, patches, by_winograd ? Way::winograd : Way::patches, source, chain.add(output, {}));
  chain.run();
  return made;
}

}  // namespace
}  // namespace hfca

HFCA_OP(conv2d,
        "(Tensor input, Tensor weight, Tensor? scale, Tensor? bias, Tensor? residual, SymInt out_channels, int[] kernel_size, "
        "int[] stride, int[] padding, int[] dilation, str activation) -> Tensor")
