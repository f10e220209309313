// The GEMMs of AMX tiles, compiled twice: for the instructions, and with HFCA_EMULATED_TILES for a machine without them. All other
// kernels of these tiers are those of a tier below (dispatch.cpp).
#include "tile_tier.h"

#include "attention/arithmetic_tiles.h"
#include "convolution/image_tiles.h"
#include "gemm/tile_gemm.h"
#include "probe/tile_limits.h"

#define HFCA_CONCAT_(a, b) a##b
#define HFCA_CONCAT(a, b) HFCA_CONCAT_(a, b)

namespace hfca {

void HFCA_CONCAT(use_tiles_, HFCA_TIER)(Kernels& kernels) {
  // Up to four rows wait for their weights, which the vectors of the tier below read as fast. Tiles add products of bfloat16 in another order
  // than vectors: drafted tokens, up to sixteen, are added in that of one row.
  constexpr int64_t few = 4, drafted = 16;
  const auto take = [&](WeightKind kind, const GemmKernels& tiles, int64_t most_others) {
    kernels.gemm[static_cast<int>(kind)].most_rows = most_others;
    kernels.gemm_of_many_rows[static_cast<int>(kind)] = tiles;
  };
  take(WeightKind::bfloat16, HFCA_TIER::TileGemm<HFCA_TIER::TileBf16>::kernels(), drafted);
  take(WeightKind::int8, HFCA_TIER::TileGemm<HFCA_TIER::TileInt8>::kernels(), few);
  take(WeightKind::int8_weight, HFCA_TIER::TileGemm<HFCA_TIER::TileInt8Weight>::kernels(), few);
  take(WeightKind::int8_image, HFCA_TIER::TileGemm<HFCA_TIER::TileInt8>::kernels_of_words(), few);
  take(WeightKind::int4, HFCA_TIER::TileGemm<HFCA_TIER::TileInt8>::kernels_of_int4(), HFCA_TIER::Int4Gemm::tile_rows);
  HFCA_TIER::TileAttention::use(kernels.attention);
  kernels.image_tiles = {&HFCA_TIER::ImageTiles<HFCA_TIER::TileInt8>::compute, &HFCA_TIER::ImageTiles<HFCA_TIER::TileBf16>::compute};
  kernels.multiply_adds = &HFCA_TIER::tile_multiply_adds;
}

}  // namespace hfca
