// Which pixels of an image are the rows of AMX tiles: plain data, no torch.
#pragma once
#include "../gemm/gemm.h"

namespace hfca {

// Rows [first, first + rows) of a product, at most 16: `offset` bytes behind the first one, and equally far apart.
struct TilePlace {
  int64_t offset, first;
  int32_t rows;
};

struct TilePlaces {
  const TilePlace* tiles;
  int64_t count, pixel_bytes;  // from one row of a tile to the next
};

// g.runs: where the pixels of the window of row 0 start, and their channels.
using ImageTilesKernel = void (*)(const Gemm& g, const TilePlaces&, int64_t begin, int64_t end);

}  // namespace hfca
