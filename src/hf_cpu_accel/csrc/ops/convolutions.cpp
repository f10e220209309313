// convolutions: several of them in one call. Schemas, checks, calls.
#include <limits>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "../convolution/pointwise_steps.h"
#include "../convolution/steps.h"
#include "../kept.h"
#include "../tensors.h"

namespace hfca {
namespace {

constexpr const char* op = "convolutions";

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
    const auto steps = reinterpret_cast<const ChainStep*>(layout.data());
    input_ = input;
    std::vector<Images> images{images_of(op, "input", input, *input_, false)};
    const Readers readers = readers_of(op, steps, count, images[0].channels, part);
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
  void add(const ChainStep& step, size_t i, size_t count, ScalarType dtype, const Readers& readers, const Part& part,
           std::vector<Images>& images) {
    STD_TORCH_CHECK(step.kind >= 0 && step.kind < step_kinds, "hf_cpu_accel::", op, ": unknown kind of step ", step.kind);
    const Images& source = images[static_cast<size_t>(step.source)];
    const Images* const residual = step.residual < 0 ? nullptr : &images[static_cast<size_t>(step.residual)];
    const bool convolves = step.is(StepKind::convolution), pools = step.is(StepKind::max_pooling);
    STD_TORCH_CHECK(step.activation >= 0 && step.activation < (convolves || pools ? activations : pointwise_activations),
                    "hf_cpu_accel::", op, ": unknown activation ", step.activation);
    const Window window = step.window(op, source);
    Patches patches = patches_of(op, source, window);
    if (step.is(StepKind::mean)) patches.out_height = patches.out_width = 1;
    const auto weight = part(step.weight);
    const bool by_winograd = convolves && is_winograd(*weight);
    Gemm g;
    g.n = step.out_channels;
    if (convolves)
      g = gemm_of_convolution(op, step.out_channels, source.channels, window, *weight, part(step.scale), part(step.bias),
                              static_cast<Activation>(step.activation));
    const bool reads_bytes = source.pixels.bytes != nullptr;
    const bool multiplies_bytes = convolves && (g.kind == WeightKind::int8_image || (by_winograd && g.weight_scale));
    STD_TORCH_CHECK(!reads_bytes || pools || multiplies_bytes, "hf_cpu_accel::", op, ": step ", i,
                    " reads an image in bytes, which weights of images and tiles in int8 alone do");
    const ByteSteps* bytes = pools ? source.pixels.bytes : nullptr;
    if (const auto range = part(step.range)) known_[i + 1] = known_steps(op, *range), bytes = &known_[i + 1];
    STD_TORCH_CHECK(!bytes || i + 1 < count, "hf_cpu_accel::", op, ": the output of the last step is no image in bytes");
    Images output = output_of(op, source, patches, g, dtype, bytes);
    output.border = fitting_border(output, readers.wanted[i + 1].border);
    const MakeWork work = convolves ? MakeWork{} : work_of(step, source, residual, window, part);
    if (i + 1 < count) output.lie_in(memory_.take(output.bytes()));
    const Gemm whole = with_images(op, g, output, convolves ? residual : nullptr, by_winograd);
    const size_t number = chain_->add(output, readers.wanted[i + 1]), reads = static_cast<size_t>(step.source);
    const auto adds = residual ? std::optional(static_cast<size_t>(step.residual)) : std::nullopt;
    const bool direct = convolves && reads_bytes && may_be_direct(op, *weight) && source.border >= step.border() &&
                        source.spare_place() < std::numeric_limits<int32_t>::max();
    const Way way = by_winograd ? Way::winograd : direct ? Way::direct : Way::patches;
    if (whole.m > 0)
      convolves ? chain_->convolve(whole, patches, way, reads, number, adds) : chain_->work(work, patches, reads, number, adds);
    for (const int64_t place : {step.source, step.residual})  // read for the last time: its memory is for the next outputs
      if (place > 0 && readers.last[static_cast<size_t>(place)] == i) memory_.give_back(images[static_cast<size_t>(place)].memory());
    images.push_back(output);
  }

  // Of a step that is no product of matrices.
  template <class Part>
  MakeWork work_of(const ChainStep& step, const Images& source, const Images* other, const Window& window, const Part& part) {
    const auto activation = static_cast<Activation>(step.activation);
    STD_TORCH_CHECK(step.is(StepKind::max_pooling) || (step.range < 0 && (!other || !other->pixels.bytes)), "hf_cpu_accel::", op,
                    ": such a step neither reads nor makes an image in bytes");
    if (step.pools()) {
      check_pooling(op, step, source, window);
      const Pooled kind = step.is(StepKind::max_pooling)       ? Pooled::largest
                          : step.is(StepKind::average_pooling) ? Pooled::mean
                                                               : Pooled::mean_within;
      return [kind](const WorkImages& images) { return std::make_unique<Pooling>(images, kind); };
    }
    if (step.is(StepKind::grouped)) {
      const OptionalTensor weight = part(step.weight), bias = part(step.bias);
      STD_TORCH_CHECK(weight && bias && !other, "hf_cpu_accel::", op, ": a step of groups has a weight and a bias, and adds nothing");
      const float* const values = grouped_weight(op, step, source, *weight);
      const Array offset = as_vector(bias, source.channels, op, "bias");
      STD_TORCH_CHECK(!offset.bf16, "hf_cpu_accel::", op, ": the bias of a step of groups is float32");
      const int64_t group = weight->size(1);
      return [=](const WorkImages& images) {
        return std::make_unique<GroupedConvolution>(images, group, values, static_cast<const float*>(offset.data), activation);
      };
    }
    if (step.is(StepKind::mean)) {
      STD_TORCH_CHECK(step.out_channels == source.channels && !other && step.activation == 0, "hf_cpu_accel::", op,
                      ": a mean has the channels of its input, and nothing else");
      return [](const WorkImages& images) { return std::make_unique<ChannelMeans>(images); };
    }
    if (step.is(StepKind::channels)) {
      std::vector<ChannelRun> runs = moved_channels(op, step, source, other, part(step.weight), window);
      return [runs = std::move(runs)](const WorkImages& images) { return std::make_unique<MovedChannels>(images, runs); };
    }
    if (step.is(StepKind::affine)) {
      check_no_window(op, window);
      STD_TORCH_CHECK(!other, "hf_cpu_accel::", op, ": an affine step adds no image");
      const float* const gain = channel_vector(op, "gain", step, source, part(step.weight));
      const float* const shift = channel_vector(op, "shift", step, source, part(step.bias));
      return [=](const WorkImages& images) { return std::make_unique<AffineImages>(images, gain, shift, activation); };
    }
    check_other(op, step, source, other, window);
    const bool product = step.is(StepKind::product);
    return [=](const WorkImages& images) { return std::make_unique<CombinedImages>(images, product, activation); };
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
