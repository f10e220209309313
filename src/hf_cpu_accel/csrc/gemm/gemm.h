// What a tier's GEMM offers and what it is given: plain data, no torch, no STL, so that nothing compiled for one instruction set
// can be picked by the linker for another.
//
//   output[m, n] = activation(input[m, k] @ weight[n, k]^T + bias[n]) + residual[m, n]
//
// Two steps, so that the caller decides how they are spread over threads:
//   pack_rows   turns a tile of input rows into "words" of four bytes (one float32, two bfloat16 or four uint8 along k), laid out
//               [k_words][rows of the tile]: the kernel then reads the input as one stream of broadcasts.
//   compute     multiplies one packed tile of rows by one weight panel and applies the epilogue.
//
// Weight layout, the same for every tier: panels of `panel_columns` output features; within a panel [k_words][panel_columns]
// words. int8 weights come with, per output feature, a scale and the sum of the quantised row (for the zero point).
#pragma once
#include <cstdint>

namespace hfca {

constexpr int panel_columns = 32;

enum class WeightKind : int { float32 = 0, bfloat16 = 1, int8 = 2 };
enum class Activation : int { none = 0, gelu, gelu_tanh, relu, silu, quick_gelu, tanh };

// A float32 or bfloat16 array.
struct Array {
  void* data = nullptr;
  bool bf16 = false;
};

// Rows of a float32 or bfloat16 matrix whose last dimension is dense. `stride` counts elements. With an index, row i is the row
// index[i] of the memory: the tokens of a padded batch without the padding between them.
struct Matrix {
  void* data = nullptr;
  int64_t stride = 0;
  bool bf16 = false;
  const int32_t* index = nullptr;

  int64_t offset(int64_t row) const { return (index ? index[row] : row) * stride; }
};

constexpr int max_outputs = 16;

struct Gemm {
  int64_t m = 0, n = 0, k = 0;
  WeightKind kind = WeightKind::float32;
  Matrix input, residual;  // residual.data may be null
  // The output features may go to several matrices (query, key and value): number i takes those from output_begin[i] to
  // output_begin[i + 1]. All but the last boundary are multiples of panel_columns.
  Matrix outputs[max_outputs];
  int64_t output_begin[max_outputs + 1] = {};
  const void* weight = nullptr;
  const float* weight_scale = nullptr;  // int8: [n]
  const float* weight_sum = nullptr;    // int8: [n]
  Array bias;                           // data may be null
  Activation activation = Activation::none;
  uint32_t* words = nullptr;     // packed input: m * input_words words
  float* input_scale = nullptr;  // int8: [m], input = (byte - zero) * scale
  float* input_zero = nullptr;   // int8: [m]
  int64_t input_words = 0;       // words per packed input row

  void write_to(Matrix output) {
    outputs[0] = output;
    output_begin[1] = n;
  }
};

// Weights that will be needed soon: `step` bytes of them are asked for per word of k. A whole row of a panel (128 bytes) means that
// they are this panel's own, read once; less, that they are this tile's share of the next panel.
struct Ahead {
  const char* weight;
  int64_t step;
};

struct GemmKernels {
  int tile_rows;                                                               // most rows of one tile
  int64_t (*input_words)(int64_t k);                                           // words per packed input row
  int64_t (*panel_bytes)(int64_t k);                                           // bytes of one weight panel
  void (*pack_rows)(const Gemm&, int64_t row, int rows);                       // rows <= tile_rows
  void (*compute)(const Gemm&, int64_t row, int rows, int64_t panel, Ahead);   // one tile of rows by one panel
};

}  // namespace hfca
