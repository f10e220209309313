// Looks rows of tables up, adds them and normalizes the sum while it is in L1.
#pragma once
#include "../norm/norm_rows.h"
#include "embedding.h"

namespace HFCA_TIER {

// Puts the sum of the tables' rows into `x` as float32, returns the sum over its columns. The tables are added in their order, as a
// model does that adds one after the other.
template <bool bf16, int tables>
inline float add_tables(const hfca::EmbeddingNorm& embedding, int64_t row, float* x) {
  const void* first = row_of(embedding.tables[0], row);
  const void* second = tables > 1 ? row_of(embedding.tables[1], row) : nullptr;
  const void* third = tables > 2 ? row_of(embedding.tables[2], row) : nullptr;
  return sum_columns(embedding.norm.columns, [=](int64_t j, int n) {
    Float value = load_columns<bf16>(first, j, n);
    if constexpr (tables > 1) value = Simd::add(value, load_columns<bf16>(second, j, n));
    if constexpr (tables > 2) value = Simd::add(value, load_columns<bf16>(third, j, n));
    store_columns<false>(x, j, n, value);
    return value;
  });
}

template <bool bf16>
inline void typed_embedding_norm(const hfca::EmbeddingNorm& embedding, int64_t begin, int64_t end, float* buffer) {
  const hfca::Norm& norm = embedding.norm;
  const float* weight = as_float32(norm.weight, norm.columns, 1.0f, buffer + norm.columns);
  const float* bias = as_float32(norm.bias, norm.columns, 0.0f, buffer + 2 * norm.columns);
  const auto add = embedding.table_count == 1   ? &add_tables<bf16, 1>
                   : embedding.table_count == 2 ? &add_tables<bf16, 2>
                                                : &add_tables<bf16, 3>;
  for (int64_t row = begin; row < end; ++row) {
    const float total = add(embedding, row, buffer);
    finish_row<false, bf16>(norm, buffer, total, weight, bias, row_of(norm.output, row));
  }
}

inline void embedding_norm(const hfca::EmbeddingNorm& embedding, int64_t begin, int64_t end, float* buffer) {
  return embedding.norm.output.bf16 ? typed_embedding_norm<true>(embedding, begin, end, buffer)
                                    : typed_embedding_norm<false>(embedding, begin, end, buffer);
}

}  // namespace HFCA_TIER
