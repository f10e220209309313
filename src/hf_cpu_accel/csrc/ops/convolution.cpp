// conv2d: activation(convolution + bias + residual); convolutions: several of them in one call. Schemas, checks, calls.
#include <limits>
#include <vector>

#include "../convolution/arguments.h"
#include "../convolution/chain.h"
#include "../tensors.h"

namespace hfca {
namespace {

WindowSide side_of(const char* op, int64_t size, int64_t stride, int64_t padding, int64_t dilation) {
  constexpr int64_t most = 1 << 20;  // keeps all positions far within an int64
  const WindowSide found{size, stride, padding, dilation};
  STD_TORCH_CHECK(found.size >= 1 && found.stride >= 1 && found.padding >= 0 && found.dilation >= 1 && found.size <= most &&
                      found.stride <= most && found.padding <= most && found.dilation <= most,
                  "hf_cpu_accel::", op, ": kernel_size, stride and dilation must be positive and padding not negative");
  return found;
}

// The patches of a convolution of images, but for where these are.
Patches patches_of(const char* op, const Images& images, const Window& window) {
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
Images images_of(const char* op, const char* name, const Tensor& tensor, Tensor& keep, bool dense = true) {
  check_floating(tensor, op, name);
  STD_TORCH_CHECK(tensor.dim() == 4, "hf_cpu_accel::", op, ": ", name, " must be [batch, height, width, channels]");
  Images images = Images::dense({nullptr, tensor.size(3), is_bf16(tensor)}, tensor.size(0), tensor.size(1), tensor.size(2), tensor.size(3));
  if (dense) images = Images::dense(as_rows(tensor, keep), images.count, images.height, images.width, images.channels);
  else
    images.pixels.data = tensor.mutable_data_ptr(), images.apart = {tensor.stride(0), tensor.stride(1), tensor.stride(2), tensor.stride(3)};
  return images;
}

Tensor empty_images(const Images& images, ScalarType dtype) {
  return empty_of({images.count, images.height, images.width, images.channels}, dtype, dtype == ScalarType::Float ? 4 : 2);
}

// What g makes of `input`, without the memory.
Images output_of(const char* op, const Images& input, const Patches& patches, const Gemm& g, ScalarType dtype,
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
Gemm with_images(const char* op, Gemm g, const Images& output, const Images* residual, bool by_winograd) {
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

// One row of the layout of `convolutions`, as ops/convolution_chain.py writes it. Without a weight it is a max pooling. With a range its
// output is an image in bytes.
struct Step {
  int64_t weight, scale, bias, range, source, residual, out_channels, activation, size[2], stride[2], padding[2], dilation[2];
};
constexpr size_t step_numbers = sizeof(Step) / sizeof(int64_t);
constexpr float largest_end = 1e37f;  // of a range: its length is finite

void check_pooling(const char* op, const Step& step, const Images& source, const Window& window) {
  // Each window then has a pixel of the image.
  STD_TORCH_CHECK(source.height > 0 && source.width > 0, "hf_cpu_accel::", op, ": a pooling needs an image with rows and columns");
  const auto fits = [](const WindowSide& side) { return 2 * side.padding <= side.size && side.dilation == 1; };
  const bool alone = step.out_channels == source.channels && step.residual < 0 && step.activation == 0 && step.range < 0;
  STD_TORCH_CHECK(
      alone && fits(window.rows) && fits(window.columns), "hf_cpu_accel::", op,
      ": a pooling has the channels of its input, no residual, range, activation or dilation, and at most half a window of padding");
}

// Whether a convolution of images in bytes is computed directly, where these have the border that it wants.
bool may_be_direct(const char* op, const Tensor& weight) {
  return has_direct_convolutions() && kind_of(weight, op) == WeightKind::int8_image;
}

// `border`, or none where the places of the images would not be known by an int32, or most of them were border.
int64_t fitting_border(Images images, int64_t border) {
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
Readers readers_of(const char* op, const Step* steps, size_t count, int64_t channels, const Part& part) {
  Readers readers{std::vector<size_t>(count + 1, count), std::vector<Wanted>(count + 1)};
  std::vector<bool> bordered(count + 1);  // whether it may have a border
  for (size_t i = 0; i < count; ++i) {
    const Step& step = steps[i];
    const auto number = static_cast<int64_t>(i);
    STD_TORCH_CHECK(step.source >= 0 && step.source <= number && step.residual <= number, "hf_cpu_accel::", op, ": step ", number,
                    " reads images that are not made before it");
    for (const int64_t place : {step.source, step.residual})
      if (place >= 0) readers.last[static_cast<size_t>(place)] = i;
    readers.dense_input |= step.residual == 0;
    const auto weight = part(step.weight);
    bordered[i + 1] = weight && step.range >= 0 && !is_winograd(*weight);
    const auto source = static_cast<size_t>(step.source);
    if (!weight) {
      readers.dense_input |= step.source == 0;
      bordered[source] = false;
      continue;
    }
    if (!may_be_direct(op, *weight)) bordered[source] = false;
    if (is_winograd(*weight) && step.residual >= 0) bordered[static_cast<size_t>(step.residual)] = false;
    readers.wanted[source].border = std::max({readers.wanted[source].border, step.padding[0], step.padding[1]});
    const WeightKind kind = kind_of(*weight, op);
    const bool several = step.size[0] > 1 || step.size[1] > 1;
    readers.dense_input |= step.source == 0 && (is_winograd(*weight) || !gathers(kind, channels, several));
    if (kind != WeightKind::int8_image) continue;
    Wanted& of = readers.wanted[source];
    of.steps = true, of.bytes |= several;
  }
  for (size_t i = 0; i <= count; ++i)
    if (!bordered[i]) readers.wanted[i].border = 0;
  return readers;
}

// What numbers of that range, [low, high], become bytes with.
ByteSteps known_steps(const char* op, const Tensor& range) {
  const bool two = range.scalar_type() == ScalarType::Float && range.is_contiguous() && sizes_of(range) == std::vector<int64_t>{2};
  const float* const ends = two ? static_cast<const float*>(range.const_data_ptr()) : nullptr;
  const bool fits = ends && ends[0] <= 0.0f && ends[1] >= 0.0f && ends[0] >= -largest_end && ends[1] <= largest_end;
  STD_TORCH_CHECK(fits, "hf_cpu_accel::", op, ": a range must be two finite float32 numbers, with 0 between them");
  return dispatch().kernels.images.steps_of_known(ends[0], ends[1]);
}

Tensor convolutions(const Tensor& input, const std::vector<Tensor>& parts, const std::vector<int64_t>& layout, bool narrow) {
  constexpr const char* op = "convolutions";
  STD_TORCH_CHECK(!layout.empty() && layout.size() % step_numbers == 0, "hf_cpu_accel::", op, ": layout must have ", step_numbers,
                  " numbers per step");
  const size_t count = layout.size() / step_numbers;
  const ScalarType between = narrow ? ScalarType::BFloat16 : input.scalar_type();
  const auto part = [&](int64_t place) -> OptionalTensor {
    STD_TORCH_CHECK(place >= -1 && place < static_cast<int64_t>(parts.size()), "hf_cpu_accel::", op, ": there is no part ", place);
    return place < 0 ? std::nullopt : OptionalTensor(parts[static_cast<size_t>(place)]);
  };
  const auto steps = reinterpret_cast<const Step*>(layout.data());
  Tensor keep_input = input;
  std::vector<Images> images{images_of(op, "input", input, keep_input, false)};
  const Readers readers = readers_of(op, steps, count, images[0].channels, part);
  if (readers.dense_input) images[0] = images_of(op, "input", input, keep_input);
  ConvolutionChain chain(team_size(std::numeric_limits<double>::max()), count);
  chain.add(images[0], readers.wanted[0]);
  ImageMemory memory;
  OptionalTensor last;
  std::vector<ByteSteps> known(count + 1);  // of the images that are bytes, where pointers to them stay valid
  for (size_t i = 0; i < count; ++i) {
    const Step& step = steps[i];
    const Images& source = images[static_cast<size_t>(step.source)];
    const Window window{side_of(op, step.size[0], step.stride[0], step.padding[0], step.dilation[0]),
                        side_of(op, step.size[1], step.stride[1], step.padding[1], step.dilation[1])};
    const Patches patches = patches_of(op, source, window);
    const auto weight = part(step.weight);
    STD_TORCH_CHECK(step.activation >= 0 && step.activation < activations, "hf_cpu_accel::", op, ": unknown activation ", step.activation);
    const bool by_winograd = weight && is_winograd(*weight), pools = !weight;
    Gemm g;
    g.n = step.out_channels;
    if (weight)
      g = gemm_of_convolution(op, step.out_channels, source.channels, window, *weight, part(step.scale), part(step.bias),
                              static_cast<Activation>(step.activation));
    else check_pooling(op, step, source, window);
    const bool reads_bytes = source.pixels.bytes != nullptr;
    STD_TORCH_CHECK(!reads_bytes || pools || g.kind == WeightKind::int8_image || (by_winograd && g.weight_scale), "hf_cpu_accel::", op,
                    ": step ", i, " reads an image in bytes, which weights of images and tiles in int8 alone do");
    const ByteSteps* bytes = pools ? source.pixels.bytes : nullptr;
    if (const auto range = part(step.range)) known[i + 1] = known_steps(op, *range), bytes = &known[i + 1];
    STD_TORCH_CHECK(!bytes || i + 1 < count, "hf_cpu_accel::", op, ": the output of the last step is no image in bytes");
    const ScalarType dtype = i + 1 < count ? between : input.scalar_type();
    Images output = output_of(op, source, patches, g, dtype, bytes);
    output.border = fitting_border(output, readers.wanted[i + 1].border);
    if (i + 1 == count) last = empty_images(output, dtype), output.pixels.data = last->mutable_data_ptr();
    else output.lie_in(memory.take(output.bytes()));
    const Images* const residual = step.residual < 0 ? nullptr : &images[static_cast<size_t>(step.residual)];
    const Gemm whole = with_images(op, g, output, residual, by_winograd);
    const size_t number = chain.add(output, readers.wanted[i + 1]);
    const bool direct = weight && reads_bytes && may_be_direct(op, *weight) &&
                        source.border >= std::max(step.padding[0], step.padding[1]) &&
                        source.spare_place() < std::numeric_limits<int32_t>::max();
    const Way way = by_winograd ? Way::winograd : direct ? Way::direct : Way::patches;
    if (whole.m > 0)
      pools ? chain.pool(patches, static_cast<size_t>(step.source), number)
            : chain.convolve(whole, patches, way, static_cast<size_t>(step.source), number,
                             residual ? std::optional(static_cast<size_t>(step.residual)) : std::nullopt);
    for (const int64_t place : {step.source, step.residual})  // read for the last time: its memory is for the next outputs
      if (place > 0 && readers.last[static_cast<size_t>(place)] == i) memory.give_back(images[static_cast<size_t>(place)].memory());
    images.push_back(output);
  }
  if (last->numel() > 0) chain.run();
  return *last;
}

}  // namespace
}  // namespace hfca

HFCA_OP(conv2d,
        "(Tensor input, Tensor weight, Tensor? scale, Tensor? bias, Tensor? residual, SymInt out_channels, int[] kernel_size, "
        "int[] stride, int[] padding, int[] dilation, str activation) -> Tensor")
HFCA_OP(convolutions, "(Tensor input, Tensor[] parts, int[] layout, bool narrow) -> Tensor")
