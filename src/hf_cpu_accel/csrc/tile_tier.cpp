// The GEMMs of AMX tiles, compiled twice: for the instructions, and with HFCA_EMULATED_TILES for a machine without them. All other
// kernels of these tiers are those of a tier below (dispatch.cpp).
#include "tile_tier.h"

#include "gemm/tile_gemm.h"
#include "probe/tile_limits.h"

#define HFCA_CONCAT_(a, b) a##b
#define HFCA_CONCAT(a, b) HFCA_CONCAT_(a, b)

namespace hfca {

void HFCA_CONCAT(use_tiles_, HFCA_TIER)(Kernels& kernels) {
  const auto of = [&](WeightKind kind) -> GemmKernels& { return kernels.gemm[static_cast<int>(kind)]; };
  of(WeightKind::bfloat16) = HFCA_TIER::TileGemm<HFCA_TIER::TileBf16>::kernels();
  of(WeightKind::int8) = HFCA_TIER::TileGemm<HFCA_TIER::TileInt8>::kernels();
  of(WeightKind::int8_weight) = HFCA_TIER::TileGemm<HFCA_TIER::TileInt8Weight>::kernels();
  of(WeightKind::int8_image) = HFCA_TIER::TileGemm<HFCA_TIER::TileInt8>::kernels_of_words();
  kernels.gemm_int4_unpacked = HFCA_TIER::TileGemm<HFCA_TIER::TileInt8>::kernels_of_int4();
  kernels.multiply_adds = &HFCA_TIER::tile_multiply_adds;
}

}  // namespace hfca
