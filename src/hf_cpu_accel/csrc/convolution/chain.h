// Convolutions one after another, by one team: what passes between them is memory of the op call.
#pragma once
#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "direct.h"
#include "driver.h"
#include "few_channels.h"
#include "images.h"
#include "pooling.h"
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

// How a convolution is computed: of patches, by tiles of the image (winograd.h), of pixels where they lie, or of rows of few channels.
enum class Way { patches, winograd, direct, few_channels };

class ConvolutionChain {
 public:
  ConvolutionChain(int64_t threads, size_t steps) : threads_(threads) { known_.reserve(steps + 1), steps_.reserve(steps); }

  // The number under which the images can be read. Those of number 0 are there, the others are made by a step.
  size_t add(const Images& images, Wanted wanted) {
    Known known{images, wanted, nullptr, nullptr};
    if (wanted.steps && !images.pixels.bytes && !known_.empty() && images.count == 1) {
      ranges_.push_back(std::make_unique<Workspace>(Workspace::size_of<float>(threads_ * range_numbers)));
      known.range = ranges_.back()->take<float>(threads_ * range_numbers);
      std::memset(known.range, 0, static_cast<size_t>(threads_ * range_numbers) * sizeof(float));
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
    if (g.kind == WeightKind::int8_image && !from.images.pixels.bytes) {
      if (!from.bytes) {
        const int64_t pixels = from.images.height * from.images.width;
        bytes_.push_back(std::make_unique<QuantizedImages>(g.input, from.images.count, pixels, from.images.channels, threads_,
                                                           from.wanted.bytes, from.range));
        from.bytes = step.makes = bytes_.back().get();
        memory_of_bytes_.push_back(std::make_unique<Workspace>(from.bytes->memory()));
        from.bytes->take(*memory_of_bytes_.back());
      }
      step.bytes = from.bytes;
    }
    steps_.push_back(std::move(step));
  }

  // The largest pixels of windows.
  void pool(const Patches& patches, size_t source, size_t output) {
    const Known &from = known_[source], &to = known_[output];
    Step step;
    step.pooling.emplace(to.images, placed(patches, from.images), from.images.pixels.bf16, to.range);
    steps_.push_back(std::move(step));
  }

  void run() {
    // In floating point, and for images in bytes what stands for zero in each.
    std::vector<std::vector<char>> zeros{std::vector<char>(static_cast<size_t>(most_channel_bytes_))};
    size_t most = 0;
    for (Step& step : steps_) {
      const ByteSteps* const bytes = step.source.pixels.bytes;
      if (bytes) zeros.emplace_back(static_cast<size_t>(step.source.channels), static_cast<char>(static_cast<uint8_t>(bytes->zero)));
      step.patches.zeros = bytes ? zeros.back().data() : zeros.front().data();
      most = std::max(most, step.prepare(threads_));
    }
    Workspace workspace(most);
    for (Step& step : steps_) {
      workspace.rewind();
      step.take(workspace, threads_);
    }
    run_team(threads_, [&](Team& team) {
      for (size_t i = 0; i < steps_.size(); ++i) {
        const bool known = i + 1 < steps_.size() && steps_[i + 1].direct;
        steps_[i].run(team, known ? steps_[i + 1].direct->first_panel(team) : WeightBytes{});
      }
    });
  }

 private:
  struct Known {
    Images images;
    Wanted wanted;
    QuantizedImages* bytes;
    float* range;
  };
  struct Step {
    Gemm g;
    Images source, output;
    Patches patches;
    Way way = Way::patches;
    bool all_places = false;  // of a direct one
    QuantizedImages *bytes = nullptr, *makes = nullptr;
    // One of these; the first two once it is known where zeros are.
    std::optional<PatchConvolution> gemm;
    std::optional<WinogradConvolution> winograd;
    std::optional<DirectConvolution> direct;
    std::optional<FewChannelConvolution> few_channels;
    std::optional<MaxPooling> pooling;

    // Bytes of memory that it takes while it runs.
    size_t prepare(int64_t threads) {
      if (pooling) return pooling->bytes(threads);
      if (way == Way::direct) return direct.emplace(g, source, patches, all_places), 0;
      if (way == Way::few_channels) return few_channels.emplace(g, source, patches).bytes();
      if (way == Way::winograd) return winograd.emplace(g, patches, threads).bytes();
      return gemm.emplace(g, source, patches, bytes, threads).bytes();
    }
    void take(Workspace& from, int64_t threads) {
      if (pooling) return pooling->take(from, threads);
      if (winograd) winograd->take(from);
      if (few_channels) few_channels->take(from);
      if (gemm) gemm->take(from);
    }
    // next: what this thread reads of the weight of the next one.
    void run(const Team& team, WeightBytes next) const {
      if (pooling) return pooling->run(team);
      if (output.border > 0) fill_border(team, output);
      if (makes) makes->make(team);
      if (direct) direct->run(team, next);
      if (winograd) winograd->run(team);
      if (few_channels) few_channels->run(team, next);
      if (gemm) gemm->run(team);
    }
  };

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
  std::vector<KnownPlaces> places_;  // few of them: blocks of a network repeat those of one another
  std::vector<Known> known_;
  std::vector<Step> steps_;
  std::vector<std::unique_ptr<QuantizedImages>> bytes_;
  std::vector<std::unique_ptr<Workspace>> memory_of_bytes_, ranges_;  // until the end: small beside the images
};

}  // namespace hfca
