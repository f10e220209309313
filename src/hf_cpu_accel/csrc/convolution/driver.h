// The GEMM of patches and weights, spread over the threads.
#pragma once
#include <vector>

#include "../gemm/driver.h"
#include "../gemm/row_blocks.h"
#include "byte_images.h"
#include "patches.h"

namespace hfca {

// What a thread tells the packing about the patches of its next tile: where their pixels are in the image, or, where the channels of a
// pixel do not fill whole lines of packed input, where it has gathered them.
class PatchRows {
 public:
  PatchRows(const Gemm& g, const Patches& patches) : patches_(patches), tile_rows_(kernels_of(g).tile_rows) {
    const int64_t unit = kernels_of(g).run_elements, channels = g.k / patches.pixels();
    in_place_ = unit > 0 && channels % unit == 0;
    runs_.count = in_place_ ? patches.pixels() : 1, runs_.length = in_place_ ? channels : g.k;
  }

  size_t bytes(int64_t threads) const {
    return Workspace::size_of<const void*>(threads * tile_rows_ * runs_.count) + Workspace::size_of<char>(gathered_bytes(threads));
  }
  void take(Workspace& workspace, int64_t threads) {
    starts_ = workspace.take<const void*>(threads * tile_rows_ * runs_.count);
    memory_ = workspace.take<char>(gathered_bytes(threads));
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
      if (in_place_) {
        patches_.starts(place, starts + i * runs_.count);
        continue;
      }
      char* const gathered = memory_ + (thread * tile_rows_ + i) * patches_.bytes();
      patches_.gather(place, gathered);
      starts[i] = gathered;
    }
  }

 private:
  int64_t gathered_bytes(int64_t threads) const { return in_place_ ? 0 : threads * tile_rows_ * patches_.bytes(); }

  Patches patches_;
  int64_t tile_rows_;
  Runs runs_;
  bool in_place_;
  const void** starts_ = nullptr;
  char* memory_ = nullptr;
};

// One convolution. `patches` have their zeros.
class PatchConvolution {
 public:
  // images: of g's input, in bytes or about to be, null where its weight wants no bytes.
  PatchConvolution(const Gemm& g, const Patches& patches, const ByteImages* images, int64_t threads)
      : g_(g),
        images_(images),
        threads_(threads),
        words_(input_words(g)),
        image_rows_(patches.out_height * patches.out_width),
        blocks_(g.m, words_, threads),
        plain_(patches.are_pixels()),
        quantises_(images && !patches.have_several_pixels()),
        rows_(g, images && !quantises_ ? images->patches(patches) : patches) {}

  size_t bytes() const {
    return static_cast<size_t>(blocks_.memories(threads_)) * GemmMemory::size_of(blocks_.most_rows(), words_) + (plain_ ? 0 : rows_.bytes(threads_));
  }

  void take(Workspace& from) {
    for (int64_t i = 0; i < blocks_.memories(threads_); ++i) memory_.emplace_back(from, blocks_.most_rows(), words_);
    if (!plain_) rows_.take(from, threads_);
  }

  void run(const Team& team) const {
    Gemm g = g_;  // see run_gemm
    if (quantises_) g.image_steps = images_->steps(), g.image_rows = image_rows_;
    if (g.range) g.range += team.slot() * range_numbers;
    blocks_.each(team, [&](const Team& workers, int64_t slot, int64_t row, int64_t rows) {
      const GemmMemory& mine = memory_[static_cast<size_t>(slot)];
      Gemm part = rows_of(g, row, rows);
      if (plain_) return run_gemm(workers, part, mine);
      part.runs = rows_.of(workers.slot());
      run_gemm(workers, part, mine, [&](int64_t first, int height) {
        rows_.set(workers.slot(), row + first, height, [&](int i, int64_t image) {
          if (!images_ || quantises_) return;
          const ByteSteps& steps = images_->steps()[image];
          mine.scale[first + i] = steps.scale, mine.zero[first + i] = steps.zero;
        });
      });
    });
  }

 private:
  Gemm g_;
  const ByteImages* images_;
  int64_t threads_, words_, image_rows_;
  RowBlocks blocks_;
  bool plain_, quantises_;  // quantises: pixels become bytes as they are packed
  PatchRows rows_;
  std::vector<GemmMemory> memory_;
};

}  // namespace hfca
