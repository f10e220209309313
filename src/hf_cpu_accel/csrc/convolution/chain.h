// Convolutions one after another, by one team: what passes between them is memory of the op call.
#pragma once
#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "direct.h"
#include "driver.h"
#include "few_channels.h"
#include "image_work.h"
#include "winograd_driver.h"

namespace hfca {

// Memory of images, for the next ones when the last reader is done.
class ImageMemory {
 public:
  void* take(size_t bytes) {
    Slot* best = nullptr;
    for (Slot& slot : slots_)
      if (slot.free && slot.bytes >= bytes && (!best || slot.bytes < best->bytes)) best = &slot;
    if (!best) {
      slots_.push_back({std::make_unique<Workspace>(bytes + 64), bytes, false, nullptr});
      best = &slots_.back();
      best->data = best->workspace->take<char>(static_cast<int64_t>(bytes));
    }
    best->free = false;
    return best->data;
  }

  void give_back(const void* data) {
    for (Slot& slot : slots_)
      if (slot.data == data) slot.free = true;
  }

  size_t bytes() const {
    size_t bytes = 0;
    for (const Slot& slot : slots_) bytes += slot.bytes;
    return bytes;
  }

 private:
  struct Slot {
    std::unique_ptr<Workspace> workspace;
    size_t bytes;
    bool free;
    void* data;
  };
  std::vector<Slot> slots_;
};

// What is asked of images: to have their range seen by what makes them, to be turned into bytes, and to have a border.
struct Wanted {
  bool steps = false, bytes = false;
  int64_t border = 0;
};

// How a convolution is computed: of patches, by tiles of the image (winograd.h), of pixels where they lie, or of rows of few channels; or that
// it is no product.
enum class Way { patches, winograd, direct, few_channels, work };

using MakeWork = std::function<std::unique_ptr<ImageWork>(const WorkImages&)>;

class ConvolutionChain {
 public:
  ConvolutionChain(int64_t threads, size_t steps) : threads_(threads) { known_.reserve(steps + 1), steps_.reserve(steps); }

  // The number under which the images can be read. Those of number 0 are there when it runs, the others are made by a step.
  size_t add(const Images& images, Wanted wanted) {
    Known known{images, wanted, nullptr, nullptr};
    if (wanted.steps && !images.pixels.bytes && !known_.empty() && images.count == 1) {
      ranges_.push_back(std::make_unique<Workspace>(Workspace::size_of<float>(threads_ * range_numbers)));
      known.range = ranges_.back()->take<float>(threads_ * range_numbers);
    }
    known_.push_back(known);
    return known_.size() - 1;
  }

  // g's input and output are those images, and so is what it adds; patches: all but where the pixels are.
  void convolve(Gemm g, const Patches& patches, Way way, size_t source, size_t output, std::optional<size_t> residual = std::nullopt) {
    Known& from = known_[source];
    if (way == Way::patches && FewChannelConvolution::takes(g, from.images, patches)) way = Way::few_channels;
    const Images& to = known_[output].images;
    Step step;
    step.all_places = way == Way::direct && takes_all_places(patches, from.images, to);
    const Images grid = step.all_places ? from.images : dense_like(to);  // a row of g for each place of these
    g.m = Places::rows(grid, to);
    g.input = from.images.pixels, g.range = known_[output].range;
    g.outputs[0].index = places_of(grid, to, to.spare_place());
    if (residual) g.residual.index = places_of(grid, known_[*residual].images, 0);
    step.g = g, step.source = from.images, step.output = to, step.patches = placed(patches, from.images), step.way = way;
    step.reads = source, step.writes = output, step.adds = residual;
    if (g.kind == WeightKind::int8_image && !from.images.pixels.bytes) {
      if (!from.bytes) {
        const int64_t pixels = from.images.height * from.images.width;
        bytes_.push_back(std::make_unique<QuantizedImages>(g.input, from.images.count, pixels, from.images.channels, threads_,
                                                           from.wanted.bytes, from.range));
        from.bytes = step.makes = bytes_.back().get();
        memory_of_bytes_.push_back(std::make_unique<Workspace>(from.bytes->memory()));
        bytes_of_images_ += from.bytes->memory();
        from.bytes->take(*memory_of_bytes_.back());
      }
      step.bytes = from.bytes;
    }
    steps_.push_back(std::move(step));
  }

  // What `make` makes of images `source` and, where there is one, `other`.
  void work(const MakeWork& make, const Patches& patches, size_t source, size_t output, std::optional<size_t> other = std::nullopt) {
    const Known &from = known_[source], &to = known_[output];
    Step step;
    step.g.range = to.range, step.source = from.images, step.output = to.images, step.patches = placed(patches, from.images);
    if (other) step.other = known_[*other].images;
    step.way = Way::work, step.make = make, step.reads = source, step.writes = output, step.adds = other;
    steps_.push_back(std::move(step));
  }

  // From now on the pixels of these images, which have no border, are there: others from run to run.
  void place(size_t number, void* pixels) {
    Known& known = known_[number];
    if (known.images.pixels.data == pixels) return;
    known.images.pixels.data = pixels;
    if (known.bytes) known.bytes->read(pixels);
    for (Step& step : steps_) step.place(number, pixels);
  }

  void run() {
    prepare();
    for (const auto& range : ranges_) {
      range->rewind();
      std::memset(range->take<float>(threads_ * range_numbers), 0, static_cast<size_t>(threads_ * range_numbers) * sizeof(float));
    }
    run_team(threads_, [&](Team& team) {
      for (size_t i = 0; i < steps_.size(); ++i) {
        const bool known = i + 1 < steps_.size() && steps_[i + 1].direct;
        steps_[i].run(team, known ? steps_[i + 1].direct->first_panel(team) : WeightBytes{});
      }
    });
  }

  // Of the memory that it has, all but the images and what is small beside them.
  size_t bytes() const { return workspace_bytes_ + bytes_of_images_; }

 private:
  struct Known {
    Images images;
    Wanted wanted;
    QuantizedImages* bytes;
    float* range;
  };
  struct Step {
    Gemm g;
    Images source, output, other;
    Patches patches;
    MakeWork make;
    Way way = Way::patches;
    bool all_places = false;  // of a direct one
    size_t reads = 0, writes = 0;  // numbers of images
    std::optional<size_t> adds;
    QuantizedImages *bytes = nullptr, *makes = nullptr;
    // One of these, once it is known where all images are.
    std::optional<PatchConvolution> gemm;
    std::optional<WinogradConvolution> winograd;
    std::optional<DirectConvolution> direct;
    std::optional<FewChannelConvolution> few_channels;
    std::unique_ptr<ImageWork> work;

    bool is_prepared() const { return gemm || winograd || direct || few_channels || work; }

    // Bytes of memory that it takes while it runs.
    size_t prepare(int64_t threads) {
      switch (way) {
        case Way::work: work = make({source, output, adds ? &other : nullptr, patches, g.range}); return work->bytes(threads);
        case Way::direct: return direct.emplace(g, source, patches, all_places), 0;
        case Way::few_channels: return few_channels.emplace(g, source, patches).bytes();
        case Way::winograd: return winograd.emplace(g, patches, threads).bytes();
        case Way::patches: break;
      }
      return gemm.emplace(g, source, patches, bytes, threads).bytes();
    }
    void take(Workspace& from, int64_t threads) {
      if (work) return work->take(from, threads);
      if (winograd) winograd->take(from);
      if (few_channels) few_channels->take(from);
      if (gemm) gemm->take(from);
    }
    // It is to be prepared anew, unless it only reads them in one place.
    void place(size_t number, void* pixels) {
      const bool read = reads == number, written = writes == number, added = adds && *adds == number;
      if (read) source.pixels.data = g.input.data = pixels, patches.data = static_cast<const char*>(pixels);
      if (written) output.pixels.data = g.outputs[0].data = pixels;
      if (added) g.residual.data = other.pixels.data = pixels;
      if (few_channels && read && !written && !added) return few_channels->read(pixels);
      if (read || written || added) gemm.reset(), winograd.reset(), direct.reset(), few_channels.reset(), work.reset();
    }
    // next: what this thread reads of the weight of the next one.
    void run(const Team& team, WeightBytes next) const {
      if (work) return work->run(team);
      if (output.border > 0) fill_border(team, output);
      if (makes) makes->make(team);
      if (direct) direct->run(team, next);
      if (winograd) winograd->run(team);
      if (few_channels) few_channels->run(team, next);
      if (gemm) gemm->run(team);
    }
  };

  // What is not prepared yet: all steps at first, afterwards those whose images are somewhere else.
  void prepare() {
    // In floating point, and for images in bytes what stands for zero in each.
    if (zeros_.empty()) {
      zeros_.emplace_back(static_cast<size_t>(most_channel_bytes_));
      for (Step& step : steps_) {
        const ByteSteps* const bytes = step.source.pixels.bytes;
        if (bytes) zeros_.emplace_back(static_cast<size_t>(step.source.channels), static_cast<char>(static_cast<uint8_t>(bytes->zero)));
        step.patches.zeros = bytes ? zeros_.back().data() : zeros_.front().data();
      }
    }
    std::vector<Step*> unprepared;
    for (Step& step : steps_)
      if (!step.is_prepared()) unprepared.push_back(&step);
    size_t most = 0;
    for (Step* step : unprepared) most = std::max(most, step->prepare(threads_));
    if (!workspace_) workspace_ = std::make_unique<Workspace>(workspace_bytes_ = most);  // images elsewhere need as much
    for (Step* step : unprepared) {
      workspace_->rewind();
      step->take(*workspace_, threads_);
    }
  }

  static Images dense_like(Images images) {
    images.border = 0;
    return images;
  }

  // Null where they are in order.
  const int32_t* places_of(const Images& grid, const Images& images, int64_t elsewhere) {
    const bool in_order = grid.border == 0 && images.border == 0 && grid.height == images.height && grid.width == images.width;
    if (in_order) return nullptr;
    for (const KnownPlaces& known : places_)
      if (known.height == images.height && known.width == images.width && known.border == images.border && known.grid_width == grid.width &&
          known.grid_height == grid.height && known.grid_border == grid.border && known.elsewhere == elsewhere)
        return known.places.index();
    places_.push_back(
        {grid.height, grid.width, grid.border, images.height, images.width, images.border, elsewhere, Places(grid, images, elsewhere)});
    return places_.back().places.index();
  }

  // Patches of these images.
  Patches placed(Patches patches, const Images& of) {
    patches.data = static_cast<const char*>(of.pixels.data);
    patches.pixel_bytes = of.pixels.stride * of.element_bytes(), patches.channel_bytes = of.channels * of.element_bytes();
    most_channel_bytes_ = std::max(most_channel_bytes_, patches.channel_bytes);
    return patches;
  }

  struct KnownPlaces {
    int64_t grid_height, grid_width, grid_border, height, width, border, elsewhere;
    Places places;
  };

  int64_t threads_, most_channel_bytes_ = 0;
  size_t workspace_bytes_ = 0, bytes_of_images_ = 0;
  std::vector<KnownPlaces> places_;  // few of them: blocks of a network repeat those of one another
  std::vector<Known> known_;
  std::vector<Step> steps_;
  std::vector<std::unique_ptr<QuantizedImages>> bytes_;
  std::vector<std::unique_ptr<Workspace>> memory_of_bytes_, ranges_;  // until the end: small beside the images
  std::vector<std::vector<char>> zeros_;
  std::unique_ptr<Workspace> workspace_;  // of one step after another
};

}  // namespace hfca
