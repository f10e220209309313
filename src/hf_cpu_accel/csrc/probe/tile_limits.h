// What a perfect kernel of tiles would reach: products without loads.
#pragma once
#include "../gemm/tile_gemm.h"
#include "limits.h"

namespace HFCA_TIER {

template <class Kind>
inline double run_tile_products(int64_t iterations, int per_word) {
  TileWork::enter();
  TileWork::mine().shape_for(tiles_rows);
  unroll<0, 8>([](auto tile) HFCA_INLINE { Tiles::zero<tile>(); });
  for (int64_t i = 0; i < iterations; ++i) {
    Kind::template add<0, 4, 6>();
    Kind::template add<1, 4, 7>();
    Kind::template add<2, 5, 6>();
    Kind::template add<3, 5, 7>();
  }
  TileWork::leave();
  return 2.0 * per_word * 4 * most_tile_rows * most_tile_rows * most_tile_rows * static_cast<double>(iterations);
}

// Of integers and bfloat16 by tiles; a product does as much as a few dozen vector instructions.
inline double tile_multiply_adds(hfca::WeightKind kind, int64_t iterations) {
  constexpr int64_t fewer = 16;
  const int64_t products = (iterations + fewer - 1) / fewer;
  switch (kind) {
    case hfca::WeightKind::bfloat16: return run_tile_products<TileBf16>(products, 2);
    case hfca::WeightKind::int8:
    case hfca::WeightKind::int8_image:
    case hfca::WeightKind::int8_weight:
    case hfca::WeightKind::int4: return run_tile_products<TileInt8>(products, 4);
    default: return multiply_adds(kind, iterations);
  }
}

}  // namespace HFCA_TIER
