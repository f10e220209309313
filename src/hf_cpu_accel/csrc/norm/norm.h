// What a tier's norms offer and what they are given: plain data, no torch.
//
//   layer_norm: output = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias      (Ba et al. 2016, arXiv:1607.06450)
//   rms_norm:   output = x / sqrt(mean(x^2) + eps) * weight                      (Zhang & Sennrich 2019, arXiv:1910.07467)
//
// over the last dimension, with x = input + residual where there is a residual; x is then also written to `sum`.
#pragma once
#include "../gemm/gemm.h"

namespace hfca {

struct Norm {
  int64_t columns = 0;
  Matrix input, residual, sum, output;  // residual.data and sum.data: both null or both not; sum has the input's type
  Array weight, bias;                   // data may be null: ones and zeros
  float eps = 0.0f;
};

constexpr int norm_buffer_rows = 3;

// Both take rows [begin, end) and a buffer of norm_buffer_rows * columns float32.
struct NormKernels {
  void (*layer_norm)(const Norm&, int64_t begin, int64_t end, float* buffer);
  void (*rms_norm)(const Norm&, int64_t begin, int64_t end, float* buffer);
};

}  // namespace hfca
