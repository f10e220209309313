// The GEMM of patches and weights, spread over the threads.
#pragma once
#include <cstring>
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
    return Workspace::size_of<const void*>(threads * tile_rows_ * runs_.count) + Workspace::size_of<char>(memory_of_patches(threads));
  }
  void take(Workspace& workspace, int64_t threads) {
    starts_ = workspace.take<const void*>(threads * tile_rows_ * runs_.count);
    memory_ = workspace.take<char>(memory_of_patches(threads));
    if (!in_place_ || patches_.zeros) return;
    std::memset(memory_, 0, static_cast<size_t>(patches_.channel_bytes));
    patches_.zeros = memory_;
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
  // The gathered ones, or the zeros beside the image.
  int64_t memory_of_patches(int64_t threads) const { return in_place_ ? patches_.channel_bytes : threads * tile_rows_ * patches_.bytes(); }

  Patches patches_;
  int64_t tile_rows_;
  Runs runs_;
  bool in_place_;
  const void** starts_ = nullptr;
  char* memory_ = nullptr;
};

// bytes: of g's input, null where its weight wants none. They are made first if they are not `made` already.
inline void run_patches(const Gemm& g, const Patches& patches, const ByteImages* bytes, bool made) {
  const bool plain = !bytes && patches.are_pixels();
  const int64_t words = input_words(g), threads = team_size(multiply_adds(g));
  const RowBlocks blocks(g.m, words, threads);
  const int64_t memories = blocks.memories(threads), rows_at_once = blocks.most_rows();
  PatchRows patch_rows(g, bytes ? bytes->patches(patches) : patches);
  Workspace workspace(static_cast<size_t>(memories) * GemmMemory::size_of(rows_at_once, words) + (plain ? 0 : patch_rows.bytes(threads)));
  std::vector<GemmMemory> memory;
  for (int64_t i = 0; i < memories; ++i) memory.emplace_back(workspace, rows_at_once, words);
  if (!plain) patch_rows.take(workspace, threads);
  run_team(threads, [&](Team& team) {
    if (bytes && !made) bytes->make(team);
    blocks.each(team, [&](const Team& workers, int64_t slot, int64_t row, int64_t rows) {
      const GemmMemory& mine = memory[static_cast<size_t>(slot)];
      Gemm part = rows_of(g, row, rows);
      if (plain) return run_gemm(workers, part, mine);
      part.runs = patch_rows.of(workers.slot());
      run_gemm(workers, part, mine, [&](int64_t first, int height) {
        patch_rows.set(workers.slot(), row + first, height, [&](int i, int64_t image) {
          if (!bytes) return;
          const ByteSteps& steps = bytes->steps(image);
          mine.scale[first + i] = steps.scale, mine.zero[first + i] = steps.zero;
        });
      });
    });
  });
}

}  // namespace hfca
