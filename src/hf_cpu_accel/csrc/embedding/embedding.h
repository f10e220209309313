// What a tier's embedding kernel is given: plain data, no torch.
//
//   output[i] = layer_norm(tables[0][i] + tables[1][i] + tables[2][i])
//
// where the rows of a table come through its index: the word, the token type and the position of token i. The sum is float32 and
// never in memory as a whole, only a row of it at a time.
#pragma once
#include "../norm/norm.h"

namespace hfca {

constexpr int max_tables = 3;

struct EmbeddingNorm {
  Norm norm;                  // columns, weight, bias, eps and output; the sum takes the place of its input
  Matrix tables[max_tables];  // all of the output's type
  int table_count = 0;
};

// Rows [begin, end), and a buffer of norm_buffer_rows * columns float32.
using EmbeddingNormKernel = void (*)(const EmbeddingNorm&, int64_t begin, int64_t end, float* buffer);

}  // namespace hfca
