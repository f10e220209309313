// What a tier's GEMM offers and what it is given: plain data, no torch, no STL, so that nothing compiled for one instruction set
// can be picked by the linker for another.
//
//   output[m, n] = activation(input[m, k] @ weight[n, k]^T + bias[n]) + residual[m, n]
//
// or, with activates_sum, activation(... + bias[n] + residual[m, n]).
//
// Two steps, so that the caller decides how they are spread over threads:
//   pack_rows   turns a tile of input rows into "words" of four bytes (one float32, two bfloat16 or four uint8 along k), laid out
//               [k_words / 16][rows of the tile][16]: the kernel then reads the input as broadcasts from one stream.
//   compute     multiplies one packed tile of rows by one weight panel and applies the epilogue.
//
// Weight layout, the same for every tier: panels of `panel_columns` output features; within a panel [k_words][panel_columns]
// words, or the groups of int4.h. Integer weights come with, per output feature, a scale and the sum of the quantized row (for the
// zero point).
#pragma once
#include <cstdint>
#include <cstring>

#include "../abi.h"  // WeightKind, Activation

namespace hfca {

constexpr int panel_columns = 32;
constexpr int cache_line = 64;  // bytes

// A bfloat16 number as float32. Always inlined: a function that tiers share must not be left in the object of one.
__attribute__((always_inline)) inline float widened(uint16_t bfloat16) {
  const uint32_t bits = static_cast<uint32_t>(bfloat16) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// A float32 or bfloat16 array.
struct Array {
  void* data = nullptr;
  bool bf16 = false;
};

// How numbers become bytes: byte = round(x * inverse) + zero, at most `most`; x is about scale * (byte - zero).
struct ByteSteps {
  float scale, inverse, zero, most = 255.0f;
};

// Rows of a float32 or bfloat16 matrix whose last dimension is dense, or of one whose numbers are bytes, made with `bytes`: images of
// convolutions only. `stride` counts elements. With an index, row i is the row index[i] of the memory: the tokens of a padded batch without
// the padding between them.
struct Matrix {
  void* data = nullptr;
  int64_t stride = 0;
  bool bf16 = false;
  const int32_t* index = nullptr;
  const ByteSteps* bytes = nullptr;

  int64_t offset(int64_t row) const { return (index ? index[row] : row) * stride; }
  int64_t element_bytes() const { return bytes ? 1 : bf16 ? 2 : 4; }
};

// Rows of the tile that is packed next which lie in memory in pieces: row i of the tile is `length` elements from each of
// starts[i * count, (i + 1) * count).
struct Runs {
  const void* const* starts = nullptr;
  int64_t count = 0, length = 0;
};

constexpr int max_outputs = 16;
// Lanes of the least and of the largest results that a thread has seen; all are 0 before it begins. NaN stays.
constexpr int64_t range_numbers = 32;

// Takes float32 tiles of results in place of output matrices: code that the compiler generated for what follows. Rows of a tile are
// panel_columns apart in a GEMM, and as many as there are features in sums over a graph; `columns` of them are valid.
struct TileStore {
  void (*call)(void* context, const float* tile, int64_t row, int64_t rows, int64_t column, int64_t columns) = nullptr;
  void* context = nullptr;
};

struct Gemm {
  int64_t m = 0, n = 0, k = 0;
  WeightKind kind = WeightKind::float32;
  Matrix input, residual;  // residual.data may be null
  Runs runs;               // of `input`, where starts is not null: its dtype is all that is read of it then
  // The output features may go to several matrices (query, key and value): number i takes those from output_begin[i] to
  // output_begin[i + 1]. All but the last boundary are multiples of panel_columns.
  Matrix outputs[max_outputs];
  int64_t output_begin[max_outputs + 1] = {};
  const void* weight = nullptr;
  int64_t group = 0;                    // int4, affine: input features that share a multiplier, or a scale and an offset
  bool half_scales = false;             // affine: scales and offsets are in half precision, not in float32
  const float* weight_scale = nullptr;  // integer weights: [n]
  const float* weight_sum = nullptr;    // integer weights: [n]
  Array bias;                           // data may be null
  Activation activation = Activation::none;
  bool activates_sum = false;  // the residual is added before the activation instead of after it
  // The first half of the output features goes through the activation, and the second half is multiplied into it: both outputs are the
  // same matrix. n is a multiple of 2 * panel_columns.
  bool gated = false;
  bool gate_last = false;  // it is the second half that goes through the activation
  // 0, or: what goes through the activation is at most this, and the other half lies within it on both sides and is added 1 (gpt-oss).
  float limit = 0.0f;
  uint32_t* words = nullptr;     // packed input: m * input_words words
  float* input_scale = nullptr;  // integer weights: [m], input = (integer - zero) * scale
  float* input_zero = nullptr;   // integer weights: [m]
  int64_t input_words = 0;       // words per packed input row
  TileStore store;               // call may be null; not with several outputs
  int64_t first_row = 0;         // what row 0 is to the store, and in images
  // int8_image: what the pixels of each image become bytes with as they are packed, and rows of each; null where they are bytes already.
  const ByteSteps* image_steps = nullptr;
  int64_t image_rows = 0;
  // Takes the least and the largest of the results, before they are rounded to bfloat16, which is less than half of one of 253 steps.
  float* range = nullptr;
  // What is multiplied next: its weights are asked for while threads wait for one another. May be null.
  const Gemm* following = nullptr;

  void write_to(Matrix output) {
    outputs[0] = output;
    output_begin[1] = n;
  }
};

// Weights that will be needed soon: `step` bytes of them are asked for per word of k, to L2. A whole row of a panel (128 bytes) means that
// they are this panel's own, read once; less, that they are this tile's share of the next panel.
struct Ahead {
  const char* weight;
  int64_t step;
};

// Weights that are read once come in two steps: far ahead to L2, whose many open requests cover the way from memory, and a few lines ahead
// to L1, whose few requests then cover the way from L2. One step to L1 alone left 12 % (bfloat16) to 24 % (int4) of memory's rate.
constexpr int64_t far_bytes = 16384, near_bytes = 2048;

// Where k is long, float32 sums are cut into sections, whose sums are added one after another: the rounding errors of a single chain of
// additions would grow with k. Sections depend on k only. 9,001 input features: largest error 3.5e-6 of the largest output in one chain,
// 0.6e-6 in sections.
constexpr int64_t longest_chain = 4096, section_words = 512;  // input words

// What is multiplied at a time where k is cut into parts (grid.h): input words [begin, end). `sums`, in tiles of [rows][panel_columns],
// takes the sums from one part to the next as the kernel likes; it is null where one part is all of k. Of all of k that is not the last,
// it takes float32.
struct Part {
  int64_t begin, end;
  float* sums;
  bool last;
};

// Tiles of images in place of rows of input (convolution/winograd.h).
struct WinogradRows {
  const void* const* pixels;  // pixels[16 * i]: the first channel of the first pixel of tile i
  int64_t words_apart, rows_apart;  // from one position of a tile to the next: packed words, and what they were quantized with
  float* scratch;  // integer weights: 16 * k numbers
};

struct GemmKernels {
  int tile_rows;                                          // most rows of one tile
  int64_t word_bytes;                                     // bytes of a panel per input word; 0 where k is not divided into parts
  int64_t (*input_words)(const Gemm&);                    // words per packed input row
  int64_t (*panel_bytes)(const Gemm&);                    // bytes of one weight panel
  void (*pack_rows)(const Gemm&, int64_t row, int rows);  // rows <= tile_rows
  // One tile of rows by one panel; `weight`: its weights from the part's first word on.
  void (*compute)(const Gemm&, int64_t row, int rows, int64_t panel, const void* weight, Ahead, Part);
  // What `weight` must point to where it is not the panel itself: words [begin, end) of it, unpacked; those behind its last one are left
  // alone. Null elsewhere. `begin` is a multiple of 16, and of 32 where that is a group of int4.
  void (*unpack)(const Gemm&, const void* panel, int64_t begin, int64_t end, void* unpacked) = nullptr;
  void (*pack_winograd)(const Gemm&, const WinogradRows&, int64_t row, int rows) = nullptr;  // null where the kind takes none
  int64_t run_elements = 0;  // rows may lie in several runs, each of a multiple of so many elements; 0: in one only
  int64_t most_rows = INT64_MAX;  // GEMMs of more are another kernel's (Kernels::gemm_of_many_rows)
  int row_unit = 1;                 // tiles but the last have multiples of so many rows
  int64_t near_words = 0;  // input words of a part, whose weights then stay in the nearest cache; 0: parts are as L2 wants them
  int row_lines = 1;       // lines of panel_columns sums that each row takes from one part to the next
  // A thread calls `enter` before its first `compute` of a GEMM, and `leave` after its last, which completes the results. Null: nothing
  // to do.
  void (*enter)() = nullptr;
  void (*leave)() = nullptr;
};

}  // namespace hfca
