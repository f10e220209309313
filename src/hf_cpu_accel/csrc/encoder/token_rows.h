// Steps of an encoder layer that go over the rows of its tokens and are neither a product nor a norm nor attention. Plain data, no torch.
#pragma once
#include "../gemm/gemm.h"

namespace hfca {

// Tables of the rotary embedding [1 or batch, length, columns], of which the first `half` columns are read: one per frequency.
struct Rotation {
  Array cos, sin;
  int64_t batch_stride = 0, position_stride = 0, half = 0;
  int64_t length = 0, heads = 0, head_size = 0;
  const int32_t* index = nullptr;  // [tokens], where in [batch * length] each is; null: all of them are computed
};

struct TokenRowKernels {
  // Turns features (i, half + i) of each head of tokens [begin, end), in place (Su et al. 2021, arXiv:2104.09864).
  void (*rotate)(const Rotation&, const Matrix& x, int64_t begin, int64_t end);
  // sum[row] = x[row] + layer_scale * branch[row], layer_scale [columns] (LayerScale: Touvron et al. 2021, arXiv:2103.17239). sum may be either of them.
  void (*add_scaled)(const Matrix& x, const Matrix& branch, const Array& layer_scale, const Matrix& sum, int64_t columns, int64_t begin,
                     int64_t end);
};

}  // namespace hfca
