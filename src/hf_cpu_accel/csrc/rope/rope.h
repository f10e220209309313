// The rotary embedding of heads that are about to attend (Su et al. 2021, arXiv:2104.09864). Plain data, no torch.
#pragma once
#include "../gemm/gemm.h"

namespace hfca {

// Heads [batch, length, heads, features], the last dimension dense, the others at any stride (in elements).
struct HeadRows {
  void* data = nullptr;
  bool bf16 = false;
  int64_t batch_stride = 0, position_stride = 0, head_stride = 0;
};

// [1 or batch, length, features]: what each feature is multiplied by.
struct RotaryTable {
  Array values;
  int64_t batch_stride = 0, position_stride = 0;
};

struct RotaryEmbedding {
  HeadRows input, output;
  RotaryTable cos, sin;
  int64_t length = 0, heads = 0, features = 0;
  bool interleaved = false;  // pairs are features (2i, 2i + 1), not (i, i + features / 2)
};

// Tokens [begin, end) of batch * length.
using RotaryEmbeddingKernel = void (*)(const RotaryEmbedding&, int64_t begin, int64_t end);

}  // namespace hfca
