// Convolutions one after another, by one team: what passes between them is memory of the op call.
#pragma once
#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "driver.h"
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

// What is asked of images: to have their range seen by what makes them, and to be turned into bytes.
struct Wanted {
  bool steps = false, bytes = false;
};

class ConvolutionChain {
 public:
  explicit ConvolutionChain(int64_t threads) : threads_(threads) {}

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

  // g's input and output are those images; patches: all but where the pixels are.
  void convolve(Gemm g, const Patches& patches, bool by_winograd, size_t source, size_t output) {
    Known& from = known_[source];
    g.input = from.images.pixels, g.range = known_[output].range;
    Step step;
    step.g = g, step.source = from.images, step.patches = placed(patches, from.images), step.by_winograd = by_winograd;
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
      for (const Step& step : steps_) step.run(team);
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
    Images source;
    Patches patches;
    bool by_winograd = false;
    QuantizedImages *bytes = nullptr, *makes = nullptr;
    // One of these; the first two once it is known where zeros are.
    std::optional<PatchConvolution> gemm;
    std::optional<WinogradConvolution> winograd;
    std::optional<MaxPooling> pooling;

    // Bytes of memory that it takes while it runs.
    size_t prepare(int64_t threads) {
      if (pooling) return pooling->bytes(threads);
      if (by_winograd) return winograd.emplace(g, patches, threads).bytes();
      return gemm.emplace(g, source, patches, bytes, threads).bytes();
    }
    void take(Workspace& from, int64_t threads) {
      if (pooling) return pooling->take(from, threads);
      by_winograd ? winograd->take(from) : gemm->take(from);
    }
    void run(const Team& team) const {
      if (pooling) return pooling->run(team);
      if (makes) makes->make(team);
      by_winograd ? winograd->run(team) : gemm->run(team);
    }
  };

  // Patches of these images.
  Patches placed(Patches patches, const Images& of) {
    patches.data = static_cast<const char*>(of.pixels.data);
    patches.pixel_bytes = of.pixels.stride * of.element_bytes(), patches.channel_bytes = of.channels * of.element_bytes();
    most_channel_bytes_ = std::max(most_channel_bytes_, patches.channel_bytes);
    return patches;
  }

  int64_t threads_, most_channel_bytes_ = 0;
  std::vector<Known> known_;
  std::vector<Step> steps_;
  std::vector<std::unique_ptr<QuantizedImages>> bytes_;
  std::vector<std::unique_ptr<Workspace>> memory_of_bytes_, ranges_;  // until the end: small beside the images
};

}  // namespace hfca
