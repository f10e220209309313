// What is done to pixels before they are multiplied, and in place of it: plain data, no torch.
#pragma once
#include <cstdint>

#include "../gemm/gemm.h"

namespace hfca {

// Pixels of one row of an image, wherever their channels lie: so many elements from one pixel, and from one channel, to the next.
struct PixelRow {
  const void* data;
  bool bf16;
  int64_t pixel_apart, channel_apart, channels;
};

// `rows` times `count` pieces of `bytes` each.
struct Pieces {
  const char* first;
  int64_t rows, rows_apart, count, apart, bytes;
};

// Pieces are copied by so many bytes: there must be room for so many behind them, and behind their copies.
constexpr int64_t copied_bytes = 64;

struct GatherKernels {
  // Pixels and channels one after another; behind those of a pixel zeros up to `channels`.
  void (*copy)(const PixelRow& from, int64_t pixels, int64_t channels, void* to, bool to_bf16);
  // Pieces one after another.
  void (*gather)(const Pieces& pieces, char* to);
  // The largest of `count` dense pixels in each channel; NaN where one is. range: as Gemm::range, may be null.
  void (*largest)(const void* const* from, bool from_bf16, int64_t count, int64_t channels, void* to, bool to_bf16, float* range);
  // Their sum times `factor` in each channel.
  void (*mean)(const void* const* from, bool from_bf16, int64_t count, int64_t channels, float factor, void* to, bool to_bf16);
  // The largest of bytes, whatever they stand for.
  void (*largest_bytes)(const void* const* from, int64_t count, int64_t channels, void* to);
};

}  // namespace hfca
