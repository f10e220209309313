// A norm of a transformer layer: of either kind, or none.
#pragma once
#include "../dispatch.h"
#include "norm.h"

namespace hfca {

struct OptionalNorm {
  NormKind kind = NormKind::none;
  Norm norm;  // columns, weights and eps

  bool exists() const { return kind != NormKind::none; }
  void run(const Matrix& input, const Matrix& output, int64_t begin, int64_t end, float* buffer) const {
    Norm n = norm;
    n.input = input, n.output = output;
    const NormKernels& kernels = dispatch().kernels.norm;
    (kind == NormKind::rms_norm ? kernels.rms_norm : kernels.layer_norm)(n, begin, end, buffer);
  }
};

inline OptionalNorm optional_norm(int64_t kind, Array weight, Array bias, double eps, int64_t columns) {
  OptionalNorm norm;
  norm.kind = static_cast<NormKind>(kind);
  norm.norm.columns = columns;
  norm.norm.weight = weight, norm.norm.bias = bias;
  norm.norm.eps = static_cast<float>(eps);
  return norm;
}

}  // namespace hfca
