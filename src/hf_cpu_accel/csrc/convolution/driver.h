// The GEMM of patches and weights, spread over the threads.
#pragma once
#include <optional>
#include <vector>

#include "../gemm/driver.h"
#include "../gemm/row_blocks.h"
#include "quantized_images.h"
#include "padded_images.h"
#include "patches.h"

namespace hfca {

// Whether patches are gathered before they are packed: where windows have several pixels whose channels do not fill whole lines of packed
// input, of whichever kernels.
inline bool gathers(WeightKind kind, int64_t channels, bool several_pixels) {
  const int64_t unit = kernels_of(kind, INT64_MAX).run_elements;
  return several_pixels && (unit == 0 || channels % unit > 0);
}

// What a thread tells the packing about the patches of its next tile: where their pixels are in the image, or where it has gathered them.
class PatchRows {
 public:
  // patches: all but where the pixels are; of the copy of the image (padded_images.h) where they are gathered.
  PatchRows(const Gemm& g, const Patches& patches)
      : patches_(patches), tile_rows_(std::max(kernels_of(g.kind, 1).tile_rows, kernels_of(g.kind, INT64_MAX).tile_rows)) {
    const int64_t channels = g.k / patches.pixels();
    gathers_ = gathers(g.kind, channels, patches.have_several_pixels());
    runs_.count = gathers_ ? 1 : patches.pixels(), runs_.length = gathers_ ? g.k : channels;
    gathered_bytes_ = gathers_ ? (patches.bytes() + copied_bytes + 63) / 64 * 64 : 0;
  }

  size_t bytes(int64_t threads) const {
    return Workspace::size_of<const void*>(threads * tile_rows_ * runs_.count) +
           Workspace::size_of<char>(threads * tile_rows_ * gathered_bytes_);
  }
  // data: the pixels.
  void take(Workspace& workspace, int64_t threads, const char* data) {
    patches_.data = data;
    starts_ = workspace.take<const void*>(threads * tile_rows_ * runs_.count);
    memory_ = workspace.take<char>(threads * tile_rows_ * gathered_bytes_);
  }

  // Those of a thread, which `set` changes.
  Runs of(int thread) const {
    Runs runs = runs_;
    runs.starts = starts_ + thread * tile_rows_ * runs_.count;
    return runs;
  }

  // Patches [first, first + rows). each(i, image of patch i)
  template <class Each>
  void set(int thread, int64_t first, int rows, const Each& each) const {
    const void** const starts = starts_ + thread * tile_rows_ * runs_.count;
    Patches::Place place = patches_.place_of(first);
    for (int i = 0; i < rows; ++i, patches_.advance(place)) {
      each(i, place.image);
      if (!gathers_) {
        patches_.starts(place, starts + i * runs_.count);
        continue;
      }
      char* const gathered = memory_ + (thread * tile_rows_ + i) * gathered_bytes_;
      dispatch().kernels.pixels.gather(patches_.pieces(place), gathered);
      starts[i] = gathered;
    }
  }

 private:
  Patches patches_;
  int64_t tile_rows_, gathered_bytes_;
  Runs runs_;
  bool gathers_;
  const void** starts_ = nullptr;
  char* memory_ = nullptr;
};

// One convolution.
class PatchConvolution {
 public:
  // source: g's input. patches: of it, with their zeros. bytes: of it, in bytes or about to be, null where g's weight wants no bytes.
  PatchConvolution(const Gemm& g, const Images& source, const Patches& patches, const QuantizedImages* bytes, int64_t threads)
      : g_(g),
        bytes_(bytes),
        threads_(threads),
        words_(most_input_words(g)),
        image_rows_(patches.out_height * patches.out_width),
        blocks_(g.m, words_, threads, g.n),
        plain_(patches.are_pixels()),
        quantizes_(bytes && !patches.have_several_pixels()),
        patches_(bytes && !quantizes_ ? bytes->patches(patches) : patches) {
    if (gathers(g.kind, source.channels, patches.have_several_pixels())) {
      padded_.emplace(source, patches, g.kind == WeightKind::bfloat16 || g.input.bf16, source.channels);
      g_.input.bf16 = padded_->is_bf16(), patches_ = padded_->patches();
    }
    rows_.emplace(g, patches_);
  }

  size_t bytes() const {
    const size_t rows = plain_ ? 0 : rows_->bytes(threads_), copy = padded_ ? padded_->memory() : 0;
    return static_cast<size_t>(blocks_.memories(threads_)) * GemmMemory::size_of(blocks_.most_rows(), words_) + rows + copy;
  }

  void take(Workspace& from) {
    for (int64_t i = 0; i < blocks_.memories(threads_); ++i) memory_.emplace_back(from, blocks_.most_rows(), words_);
    if (padded_) padded_->take(from);
    if (!plain_) rows_->take(from, threads_, padded_ ? padded_->data() : patches_.data);
  }

  void run(const Team& team) const {
    Gemm g = g_;  // see run_gemm
    if (padded_) padded_->make(team);
    if (quantizes_) g.image_steps = bytes_->steps(), g.image_rows = image_rows_;
    if (g.range) g.range += team.slot() * range_numbers;
    blocks_.each(team, [&](const Team& workers, int64_t slot, int64_t row, int64_t rows) {
      const GemmMemory& mine = memory_[static_cast<size_t>(slot)];
      Gemm part = rows_of(g, row, rows);
      if (plain_) return run_gemm(workers, part, mine);
      part.runs = rows_->of(workers.slot());
      run_gemm(workers, part, mine, [&](int64_t first, int height) {
        rows_->set(workers.slot(), row + first, height, [&](int i, int64_t image) {
          if (!bytes_ || quantizes_) return;
          const ByteSteps& steps = bytes_->steps()[image];
          mine.scale[first + i] = steps.scale, mine.zero[first + i] = steps.zero;
        });
      });
    });
  }

 private:
  Gemm g_;
  const QuantizedImages* bytes_;
  int64_t threads_, words_, image_rows_;
  RowBlocks blocks_;
  bool plain_, quantizes_;  // quantizes: pixels become bytes as they are packed
  Patches patches_;
  std::optional<PaddedImages> padded_;
  std::optional<PatchRows> rows_;
  std::vector<GemmMemory> memory_;
};

}  // namespace hfca
