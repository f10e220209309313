// Snake, x + scale sin(alpha x)^2 (Ziyin et al. 2020, arXiv:2006.08195), the activation of codecs of sound and of vocoders. Plain data,
// no torch.
#pragma once
#include "../gemm/gemm.h"

namespace hfca {

struct Snake {
  const void* input = nullptr;
  void* output = nullptr;
  bool bf16 = false, channels_last = false;
  // Rows are those of one channel, row i of channel i % channels, or, with channels_last, of all channels.
  int64_t channels = 0, columns = 0;
  const float *alpha = nullptr, *scale = nullptr;  // [channels]
};

// Rows [begin, end).
using SnakeKernel = void (*)(const Snake&, int64_t begin, int64_t end);

}  // namespace hfca
