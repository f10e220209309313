// What generated code calls in the library: products whose results it takes tile by tile, while they lie in the first cache,
// for the pointwise operations that follow. Plain data: the library and the generated code may come from different compilers.
#pragma once
#include <cstdint>

namespace hf_cpu_accel_tiles {

// Another number whenever something below changes: what was compiled for one library is not run by another.
constexpr int64_t version = 4;

// Rows of float32 or bfloat16 (then of 16-bit halves), `stride` elements from one to the next; a vector is one row.
struct Rows {
  const void* data;  // may be null where an argument is optional
  int64_t stride;
  bool bf16;
};

// A weight as packing/linear.py packs it, and what is added to the products.
struct Weight {
  const void* data;
  int32_t kind;        // WeightKind of csrc/abi.h
  int64_t group;       // int4: input features that share a multiplier
  const float* scale;  // integers: [2][out_features], multipliers and sums
  Rows bias;
};

// `tile` is output[row .. row + rows)[column .. column + columns) in float32, 32 elements from one of its rows to the
// next. Called by several threads at a time.
using Store = void (*)(void* context, const float* tile, int64_t row, int64_t rows, int64_t column, int64_t columns);

// activation(input @ weight^T + bias) + residual; with `second`, what `ffn` and `gated_ffn` compute.
struct Product {
  int64_t rows, in_features, intermediate_features, out_features;
  Rows input, residual;
  Weight first, second;  // second.data is null for one linear
  int32_t activation;    // Activation of csrc/abi.h
  bool gated, gate_last;
  Store store;
  void* context;
};

struct Library {
  int64_t version;
  int64_t abi;  // current_abi of csrc/abi.h, whose numbers weights and products have
  void (*multiply)(const Product&);
};

}  // namespace hf_cpu_accel_tiles
