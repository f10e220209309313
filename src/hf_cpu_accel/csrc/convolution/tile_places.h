// Which pixels of an image are the rows of AMX tiles: plain data, no torch.
#pragma once
#include "../gemm/gemm.h"

namespace hfca {

// Rows [first, first + rows) of a product, at most 16: `offset` bytes behind the first one, and equally far apart.
struct TilePlace {
  int64_t offset, first;
  int32_t rows;
};

struct WeightBytes {
  const char* first = nullptr;
  int64_t count = 0;
};

// A run of a window (Gemm::runs) is `steps` pieces of `step_bytes`, each of which is a row of a tile.
struct TilePlaces {
  const TilePlace* tiles;
  int64_t count, pixel_bytes;  // from one row of a tile to the next
  int64_t steps, step_bytes;
  WeightBytes next;  // of the product behind this one: asked for while the last panel is multiplied
};

// g.runs: where the runs of the window of row 0 start. A panel of the weight has their steps, one after another.
using ImageTilesKernel = void (*)(const Gemm& g, const TilePlaces&, int64_t begin, int64_t end);

// Of images in bytes, and of those in bfloat16 with few channels.
struct ImageTilesKernels {
  ImageTilesKernel bytes = nullptr, few_channels = nullptr;
};

}  // namespace hfca
