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

// A number takes one word where sums are made of float32, half a word of bfloat16.
template <class Dot>
constexpr int values_of_word = Dot::Words::count(chunk) == chunk ? 1 : 2;

// sums[rows][columns] = factor * left[k / 32][rows][32] @ right[k][columns], or with `accumulate` the old sums + the product, columns =
// vectors * Simd::width of a chunk. Where two values share a word, so do those of two neighboring rows of `right`. `words`: of k.
template <class Dot, int rows, int vectors>
inline void multiply_tile(const uint32_t* __restrict left, int64_t words, const uint32_t* __restrict right, float* __restrict sums,
                          bool accumulate, float factor) {
  constexpr int row_words = chunk / values_of_word<Dot>;
  Float acc[rows * vectors];
  if (accumulate)
    unroll<0, rows * vectors>([&](auto i) HFCA_INLINE { acc[i] = Simd::load(sums + i / vectors * chunk + i % vectors * Simd::width); });
  else unroll<0, rows * vectors>([&](auto i) HFCA_INLINE { acc[i] = Simd::zero(); });
  for (; words > 0; words -= row_words, left += rows * row_words) {
    const uint32_t* end = left + (words < row_words ? words : row_words);
    for (const uint32_t* a = left; a < end; ++a, right += chunk) {
      const typename Dot::Weight first = Dot::load(right), last = Dot::load(right + (vectors - 1) * Simd::width);
      unroll<0, rows>([&](auto i) HFCA_INLINE {
        const auto x = Dot::broadcast(a + i * row_words);
        acc[i * vectors] = Dot::step(acc[i * vectors], x, first);
        if constexpr (vectors == 2) acc[i * vectors + 1] = Dot::step(acc[i * vectors + 1], x, last);
      });
    }
  }
  const Float scale = Simd::set1(factor);
  unroll<0, rows * vectors>([&](auto i) HFCA_INLINE {
    Simd::store(sums + i / vectors * chunk + i % vectors * Simd::width, accumulate ? acc[i] : Simd::mul(acc[i], scale));
  });
}

using MultiplyTile = void (*)(const uint32_t*, int64_t, const uint32_t*, float*, bool, float);

// The multiplication for a number of rows known at run time: full width, or one vector wide.
template <class Dot>
inline MultiplyTile multiply_tile_of(int rows, bool full) {
  switch (rows) {
#define HFCA_ROWS(R)                                                                                              \
  case R:                                                                                                         \
    if constexpr (R <= tile_rows) return full ? &multiply_tile<Dot, R, Dot::vectors> : &multiply_tile<Dot, R, 1>; \
    else break;
    // clang-format off
    HFCA_ROWS(1) HFCA_ROWS(2) HFCA_ROWS(3) HFCA_ROWS(4) HFCA_ROWS(5) HFCA_ROWS(6) HFCA_ROWS(7)
    HFCA_ROWS(8) HFCA_ROWS(9) HFCA_ROWS(10) HFCA_ROWS(11) HFCA_ROWS(12) HFCA_ROWS(13) HFCA_ROWS(14)
    // clang-format on
#undef HFCA_ROWS
  }
  return nullptr;
}

// out[rows][n] = factor * left[rows][k] @ right[k][n] for any n; `right` has `right_words` rows of storage per chunk. Columns from n up to
// the next multiple of the vector width are computed as well, those behind are left alone.
template <class Dot>
inline void multiply_chunks(int rows, const uint32_t* left, int64_t words, const uint32_t* right, int64_t right_words, int64_t n,
                            float* out, bool accumulate, float factor = 1.0f) {
  const MultiplyTile full = multiply_tile_of<Dot>(rows, true), narrow = multiply_tile_of<Dot>(rows, false);
  for (int64_t c = 0; c < n; c += tile_columns)
    (n - c > Simd::width ? full : narrow)(left, words, right + c / chunk * right_words * chunk + c % chunk,
                                          out + c / chunk * rows * chunk + c % chunk, accumulate, factor);
}

inline const uint32_t* as_words(const float* x) { return reinterpret_cast<const uint32_t*>(x); }

}  // namespace HFCA_TIER
