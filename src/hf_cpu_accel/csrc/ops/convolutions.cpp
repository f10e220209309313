// convolutions: several of them in one call. Schemas, checks, calls.
#include <limits>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "../convolution/arguments.h"
#include "../convolution/chain.h"
#include "../kept.h"
#include "../tensors.h"

namespace hfca {
namespace {

constexpr const char* op = "convolutions";

// One row of the layout of `convolutions`, as ops/convolution_chain.py writes it. Without a weight it is a max pooling. With a range its
// output is an image in bytes.
struct Step {
  int64_t weight, scale, bias, range, source, residual, out_channels, activation, size[2], stride[2], padding[2], dilation[2];
};
constexpr size_t step_numbers = sizeof(Step) / sizeof(int64_t);
constexpr float largest_end = 1e37f;  // of a range: its length is finite

void check_pooling(const Step& step, const Images& source, const Window& window) {
  // Each window then has a pixel of the image.
  STD_TORCH_CHECK(source.height > 0 && source.width > 0, "hf_cpu_accel::", op, ": a pooling needs an image with rows and columns");
  const auto fits = [](const WindowSide& side) { return 2 * side.padding <= side.size && side.dilation == 1; };
  const bool alone = step.out_channels == source.channels && step.residual < 0 && step.activation == 0 && step.range < 0;
  STD_TORCH_CHECK(
      alone && fits(window.rows) && fits(window.columns), "hf_cpu_accel::", op,
      ": a pooling has the channels of its input, no residual, range, activation or dilation, and at most half a window of padding");
}

// Whether a convolution of images in bytes is computed directly, where these have the border that it wants.
bool may_be_direct(const Tensor& weight) { return has_direct_convolutions() && kind_of(weight, op) == WeightKind::int8_image; }

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
Readers readers_of(const Step* steps, size_t count, int64_t channels, const Part& part) {
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
    if (!may_be_direct(*weight)) bordered[source] = false;
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
ByteSteps known_steps(const Tensor& range) {
  const bool two = range.scalar_type() == ScalarType::Float && range.is_contiguous() && sizes_of(range) == std::vector<int64_t>{2};
  const float* const ends = two ? static_cast<const float*>(range.const_data_ptr()) : nullptr;
  const bool fits = ends && ends[0] <= 0.0f && ends[1] >= 0.0f && ends[0] >= -largest_end && ends[1] <= largest_end;
  STD_TORCH_CHECK(fits, "hf_cpu_accel::", op, ": a range must be two finite float32 numbers, with 0 between them");
  return dispatch().kernels.images.steps_of_known(ends[0], ends[1]);
}

// All that a call looks up, for inputs of one kind, and the memory of what is between its steps. One call at a time.
class BoundChain {
 public:
  BoundChain(const Tensor& input, const std::vector<Tensor>& parts, const std::vector<int64_t>& layout, bool narrow)
      : kind_(kind_of_input(input)), dtype_(input.scalar_type()) {
    STD_TORCH_CHECK(!layout.empty() && layout.size() % step_numbers == 0, "hf_cpu_accel::", op, ": layout must have ", step_numbers,
                    " numbers per step");
    const size_t count = layout.size() / step_numbers;
    const ScalarType between = narrow ? ScalarType::BFloat16 : dtype_;
    const auto part = [&](int64_t place) -> OptionalTensor {
      STD_TORCH_CHECK(place >= -1 && place < static_cast<int64_t>(parts.size()), "hf_cpu_accel::", op, ": there is no part ", place);
      return place < 0 ? std::nullopt : OptionalTensor(parts[static_cast<size_t>(place)]);
    };
    const auto steps = reinterpret_cast<const Step*>(layout.data());
    input_ = input;
    std::vector<Images> images{images_of(op, "input", input, *input_, false)};
    const Readers readers = readers_of(steps, count, images[0].channels, part);
    dense_ = readers.dense_input;
    if (dense_) images[0] = images_of(op, "input", input, *input_);
    chain_.emplace(team_size(std::numeric_limits<double>::max()), count);
    chain_->add(images[0], readers.wanted[0]);
    known_.resize(count + 1);
    for (size_t i = 0; i < count; ++i) add(steps[i], i, count, i + 1 < count ? between : dtype_, readers, part, images);
    last_ = images.back();
  }

  // Whether it is for such inputs, and for as many threads as there are now.
  bool takes(const Tensor& input) const { return input.scalar_type() == dtype_ && kind_of_input(input) == kind_; }

  // For the input that it was bound to; once.
  Tensor run() {
    Tensor output = empty_images(last_, dtype_);
    if (output.numel() > 0) {
      chain_->place(known_.size() - 1, output.mutable_data_ptr());
      chain_->run();
    }
    input_.reset();
    return output;
  }

  // For one that it takes.
  Tensor run(const Tensor& input) {
    input_ = input;
    chain_->place(0, images_of(op, "input", input, *input_, dense_).pixels.data);
    return run();
  }

  size_t bytes() const { return memory_.bytes() + chain_->bytes(); }

 private:
  static std::vector<int64_t> kind_of_input(const Tensor& input) {
    std::vector<int64_t> kind{static_cast<int64_t>(torch::stable::get_num_threads())};
    for (int64_t i = 0; i < input.dim(); ++i) kind.push_back(input.size(i)), kind.push_back(input.stride(i));
    return kind;
  }

  // Step i of `count`, whose output it adds to the images.
  template <class Part>
  void add(const Step& step, size_t i, size_t count, ScalarType dtype, const Readers& readers, const Part& part,
           std::vector<Images>& images) {
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
    else check_pooling(step, source, window);
    const bool reads_bytes = source.pixels.bytes != nullptr;
    STD_TORCH_CHECK(!reads_bytes || pools || g.kind == WeightKind::int8_image || (by_winograd && g.weight_scale), "hf_cpu_accel::", op,
                    ": step ", i, " reads an image in bytes, which weights of images and tiles in int8 alone do");
    const ByteSteps* bytes = pools ? source.pixels.bytes : nullptr;
    if (const auto range = part(step.range)) known_[i + 1] = known_steps(*range), bytes = &known_[i + 1];
    STD_TORCH_CHECK(!bytes || i + 1 < count, "hf_cpu_accel::", op, ": the output of the last step is no image in bytes");
    Images output = output_of(op, source, patches, g, dtype, bytes);
    output.border = fitting_border(output, readers.wanted[i + 1].border);
    if (i + 1 < count) output.lie_in(memory_.take(output.bytes()));
    const Images* const residual = step.residual < 0 ? nullptr : &images[static_cast<size_t>(step.residual)];
    const Gemm whole = with_images(op, g, output, residual, by_winograd);
    const size_t number = chain_->add(output, readers.wanted[i + 1]);
    const bool direct = weight && reads_bytes && may_be_direct(*weight) && source.border >= std::max(step.padding[0], step.padding[1]) &&
                        source.spare_place() < std::numeric_limits<int32_t>::max();
    const Way way = by_winograd ? Way::winograd : direct ? Way::direct : Way::patches;
    if (whole.m > 0)
      pools ? chain_->pool(patches, static_cast<size_t>(step.source), number)
            : chain_->convolve(whole, patches, way, static_cast<size_t>(step.source), number,
                               residual ? std::optional(static_cast<size_t>(step.residual)) : std::nullopt);
    for (const int64_t place : {step.source, step.residual})  // read for the last time: its memory is for the next outputs
      if (place > 0 && readers.last[static_cast<size_t>(place)] == i) memory_.give_back(images[static_cast<size_t>(place)].memory());
    images.push_back(output);
  }

  std::vector<int64_t> kind_;
  ScalarType dtype_;
  bool dense_ = false;
  OptionalTensor input_;  // or what was made of it, while it is read
  Images last_;
  std::vector<ByteSteps> known_;  // of the images that are bytes, where pointers to them stay valid
  ImageMemory memory_;
  std::optional<ConvolutionChain> chain_;
};

Tensor convolutions(const Tensor& input, const std::vector<Tensor>& parts, const std::vector<int64_t>& layout, bool narrow) {
  return BoundChain(input, parts, layout, narrow).run();
}

// The arguments of many calls, and chains that were bound to them for the inputs of the latest.
class KeptConvolutions {
 public:
  KeptConvolutions(std::vector<Tensor> parts, std::vector<int64_t> layout, bool narrow)
      : parts_(std::move(parts)), layout_(std::move(layout)), narrow_(narrow), places_(places()) {}

  Tensor run(const Tensor& input) {
    Bound bound = take(input);
    Tensor output = bound.chain->run(input);
    give_back(std::move(bound));
    return output;
  }

 private:
  // More threads at once, and larger inputs, for which that is little beside what they compute, have theirs bound in each call.
  static constexpr size_t most_idle = 2, most_bytes = size_t{32} << 20;

  struct Bound {
    std::unique_ptr<BoundChain> chain;
    int64_t move;  // how often parts had moved when it was bound
  };

  // Where the parts lie: it is others who may move them, to memory that processes share.
  std::vector<const void*> places() const {
    std::vector<const void*> places;
    places.reserve(parts_.size());
    for (const Tensor& part : parts_) places.push_back(part.const_data_ptr());
    return places;
  }

  Bound take(const Tensor& input) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (auto now = places(); now != places_) idle_.clear(), places_ = std::move(now), ++moves_;
    for (auto idle = idle_.rbegin(); idle != idle_.rend(); ++idle) {
      if (!idle->chain->takes(input)) continue;
      Bound found = std::move(*idle);
      idle_.erase(std::next(idle).base());
      return found;
    }
    const int64_t move = moves_;
    lock.unlock();
    return {std::make_unique<BoundChain>(input, parts_, layout_, narrow_), move};
  }

  void give_back(Bound bound) {
    if (bound.chain->bytes() > most_bytes) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (bound.move != moves_) return;
    if (idle_.size() == most_idle) idle_.erase(idle_.begin());
    idle_.push_back(std::move(bound));
  }

  const std::vector<Tensor> parts_;
  const std::vector<int64_t> layout_;
  const bool narrow_;
  std::mutex mutex_;
  std::vector<const void*> places_;
  std::vector<Bound> idle_;  // the latest last
  int64_t moves_ = 0;
};

// Never destroyed, see ops/values.cpp.
Kept<KeptConvolutions>& kept() {
  static Kept<KeptConvolutions>& instance = *new Kept<KeptConvolutions>;
  return instance;
}

int64_t keep_convolutions(const std::vector<Tensor>& parts, const std::vector<int64_t>& layout, bool narrow) {
  return kept().keep(std::make_shared<KeptConvolutions>(parts, layout, narrow));
}

Tensor kept_convolutions(const Tensor& input, int64_t number) { return kept().get(number, "kept_convolutions")->run(input); }

bool drop_convolutions(int64_t number) { return kept().drop(number); }

}  // namespace
}  // namespace hfca

HFCA_OP(convolutions, "(Tensor input, Tensor[] parts, int[] layout, bool narrow) -> Tensor")
HFCA_OP(kept_convolutions, "(Tensor input, int number) -> Tensor")
HFCA_OP_WITHOUT_TENSORS(keep_convolutions, "(Tensor[] parts, int[] layout, bool narrow) -> int")
HFCA_OP_WITHOUT_TENSORS(drop_convolutions, "(int number) -> bool")
