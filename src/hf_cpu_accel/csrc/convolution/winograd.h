// Winograd's convolution F(2 x 2, 3 x 3) (Lavin & Gray 2015, arXiv:1509.09308): 4 multiplications for each output pixel of a 3 x 3 window
// instead of 9. Plain data: no torch.
//
// The image is cut into tiles of 4 x 4 pixels, each two further than the last, that give 2 x 2 output pixels:
//
//   output = A^T [(G weight G^T) * (B^T tile B)] A      * number by number, and added up over the channels
//
//         1  0 -1  0           1   0   0
//   B^T = 0  1  1  0     G =  1/2 1/2 1/2     A^T = 1  1  1  0
//         0 -1  1  0          1/2-1/2 1/2           0  1 -1 -1
//         0  1  0 -1           0   0   1
//
// Added up over the channels, the product in the middle is 16 matrix products, one for each position of a tile. For integer weights the
// input of each is rotated and quantized by row, as that of a linear layer.
#pragma once
#include "../gemm/gemm.h"

namespace hfca {

constexpr int tile_side = 4, tile_positions = tile_side * tile_side;

// What one tile gives: the number of its first output pixel, and whether there are pixels to the right of it and below.
struct OutputTile {
  int32_t pixel;
  bool right, below;
};

// The sums of tiles with one panel of weights.
struct WinogradSums {
  const OutputTile* tiles;
  int64_t count, out_width;
  const float* sums;                // of a position: [tile][panel_columns]
  int64_t sums_apart, rows_apart;  // from one position to the next: sums, and what the input was quantized with
};

// To the outputs of `g`, whose integer weights have scales and sums [position][n].
using WinogradOutputKernel = void (*)(const Gemm& g, const WinogradSums&, int64_t panel);

}  // namespace hfca
