// The end of a mixture of experts: what the experts made of a token, each by its weight, in one row. Plain data, no torch.
#pragma once
#include "../gemm/gemm.h"

namespace hfca {

// Columns [begin, end) of row `row` of `sum` = residual (none where its data is null) + the weighted sum of `count` float32 rows.
using CombineKernel = void (*)(const Matrix& residual, const float* const* rows, const float* weights, int64_t count, const Matrix& sum,
                               int64_t row, int64_t begin, int64_t end);

}  // namespace hfca
