// The multiplication inside attention: a tile of rows by up to 32 columns, sums in registers.
//
// Every matrix is stored in chunks of 32 columns, [columns / 32][rows][32]: what one multiplication writes is the left side of the
// next one, so that probabilities are never transposed, and all distances are compile-time constants, so that each broadcast is
// one load with an immediate offset. Register budget as in gemm/microkernel.h.
#pragma once
#include "../gemm/dot.h"
#include "../simd/math.h"
#include "../simd/unroll.h"

namespace HFCA_TIER {

constexpr int chunk = 32;                                    // columns of a chunk
constexpr int tile_rows = DotF32::rows;
constexpr int tile_columns = DotF32::vectors * Simd::width;  // 32, 16 or 8: divides chunk

// sums[rows][columns] (+)= left[k / 32][rows][32] @ right[k][columns], columns = vectors * Simd::width of a chunk.
template <int rows, int vectors>
inline void multiply_tile(const float* __restrict left, int64_t k, const float* __restrict right, float* __restrict sums, bool accumulate) {
  Float acc[rows * vectors];
  if (accumulate)
    unroll<0, rows * vectors>([&](auto i) HFCA_INLINE { acc[i] = Simd::load(sums + i / vectors * chunk + i % vectors * Simd::width); });
  else
    unroll<0, rows * vectors>([&](auto i) HFCA_INLINE { acc[i] = Simd::zero(); });
  for (; k > 0; k -= chunk, left += rows * chunk) {
    const float* end = left + (k < chunk ? k : chunk);
    for (const float* a = left; a < end; ++a, right += chunk) {
      const Float first = Simd::load(right), last = Simd::load(right + (vectors - 1) * Simd::width);
      unroll<0, rows>([&](auto i) HFCA_INLINE {
        const Float x = Simd::set1(a[i * chunk]);
        acc[i * vectors] = Simd::fma(x, first, acc[i * vectors]);
        if constexpr (vectors == 2) acc[i * vectors + 1] = Simd::fma(x, last, acc[i * vectors + 1]);
      });
    }
  }
  unroll<0, rows * vectors>([&](auto i) HFCA_INLINE { Simd::store(sums + i / vectors * chunk + i % vectors * Simd::width, acc[i]); });
}

using MultiplyTile = void (*)(const float*, int64_t, const float*, float*, bool);

// The multiplication for a number of rows known at run time: full width, or one vector wide.
inline MultiplyTile multiply_tile_of(int rows, bool full) {
  switch (rows) {
#define HFCA_ROWS(R) \
  case R:            \
    if constexpr (R <= tile_rows) return full ? &multiply_tile<R, DotF32::vectors> : &multiply_tile<R, 1>; else break;
    HFCA_ROWS(1) HFCA_ROWS(2) HFCA_ROWS(3) HFCA_ROWS(4) HFCA_ROWS(5) HFCA_ROWS(6) HFCA_ROWS(7)
    HFCA_ROWS(8) HFCA_ROWS(9) HFCA_ROWS(10) HFCA_ROWS(11) HFCA_ROWS(12) HFCA_ROWS(13) HFCA_ROWS(14)
#undef HFCA_ROWS
  }
  return nullptr;
}

// out[rows][n] = left[rows][k] @ right[k][n] for any n; `right` has `right_rows` rows of storage per chunk. Columns from n up to the
// next multiple of the vector width are computed as well, those behind are left alone.
inline void multiply_chunks(int rows, const float* left, int64_t k, const float* right, int64_t right_rows, int64_t n, float* out, bool accumulate) {
  const MultiplyTile full = multiply_tile_of(rows, true), narrow = multiply_tile_of(rows, false);
  for (int64_t c = 0; c < n; c += tile_columns)
    (n - c > Simd::width ? full : narrow)(left, k, right + c / chunk * right_rows * chunk + c % chunk, out + c / chunk * rows * chunk + c % chunk,
                                          accumulate);
}

}  // namespace HFCA_TIER
