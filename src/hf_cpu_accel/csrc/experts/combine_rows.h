// A token's rows, weighted: see combine.h.
#pragma once
#include "../norm/norm_rows.h"
#include "combine.h"

namespace HFCA_TIER {

inline void combine_rows(const hfca::Matrix& residual, const float* const* rows, const float* weights, int64_t count,
                         const hfca::Matrix& sum, int64_t row, int64_t begin, int64_t end) {
  const void* before = residual.data ? row_of(residual, row) : nullptr;
  void* out = row_of(sum, row);
  for (int64_t j = begin; j < end; j += Simd::width) {
    const int n = end - j < Simd::width ? static_cast<int>(end - j) : Simd::width;
    Float total = !before ? Simd::zero() : residual.bf16 ? load_columns<true>(before, j, n) : load_columns<false>(before, j, n);
    for (int64_t i = 0; i < count; ++i) total = Simd::fma(Simd::set1(weights[i]), load_columns<false>(rows[i], j, n), total);
    sum.bf16 ? store_columns<true>(out, j, n, total) : store_columns<false>(out, j, n, total);
  }
}

}  // namespace HFCA_TIER
