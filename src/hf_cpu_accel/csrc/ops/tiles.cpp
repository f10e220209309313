// The functions that generated code calls (tiles.h), and the op that tells where they are.

#include "../gemm/gemm_op.h"
#include "../op.h"
#include "tiles.h"

namespace hfca {
namespace {

namespace tiles = hf_cpu_accel_tiles;

Matrix matrix_of(const tiles::Rows& rows) { return {const_cast<void*>(rows.data), rows.stride, rows.bf16}; }

// The shapes are those that the compiler saw: nothing is left to check.
Gemm gemm_of(int64_t m, int64_t n, int64_t k, const tiles::Weight& weight) {
  Gemm g;
  g.m = m, g.n = n, g.k = k;
  g.kind = static_cast<WeightKind>(weight.kind), g.weight = weight.data, g.group = weight.group;
  g.weight_scale = weight.scale, g.weight_sum = weight.scale ? weight.scale + n : nullptr;
  g.bias = {const_cast<void*>(weight.bias.data), weight.bias.bf16};
  g.write_to({});
  return g;
}

void multiply(const tiles::Product& product) {
  const bool pair = product.second.data != nullptr;
  const int64_t between = pair ? (product.gated ? 2 : 1) * product.intermediate_features : product.out_features;
  Gemm first = gemm_of(product.rows, between, product.in_features, product.first), second;
  first.input = matrix_of(product.input), first.activation = static_cast<Activation>(product.activation), first.gated = product.gated,
  first.gate_last = product.gate_last;
  if (pair) second = gemm_of(product.rows, product.out_features, product.intermediate_features, product.second);
  Gemm& last = pair ? second : first;
  last.residual = matrix_of(product.residual);
  last.store = {product.store, product.context};
  pair ? run_gemm_pair(first, second) : run_gemm_op(first);
}

int64_t tile_library() {
  static const tiles::Library functions{tiles::version, current_abi, &multiply};
  return reinterpret_cast<int64_t>(&functions);
}

}  // namespace
}  // namespace hfca

HFCA_OP_WITHOUT_TENSORS(tile_library, "() -> int")
