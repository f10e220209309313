// What is done to the pixels of images channel by channel, without a product of matrices: plain data, no torch.
#pragma once
#include "../gemm/gemm.h"

namespace hfca {

// One row of the outputs of a convolution in groups of so many channels, as many outputs as inputs; channels [begin, end) of it. Distances
// count elements.
struct GroupedRow {
  const void* input;  // the first pixel of the first row of the window that lies within the image
  bool input_bf16;
  int64_t row_apart, pixel_apart;  // of `input`: from one row of the window to the next, and from one pixel to the next
  const float* weight;             // [rows][size][group][channels]: of the rows of the window that lie within the image
  const float* bias;               // [channels]
  int64_t rows, channels, group;
  int64_t size, stride, padding, dilation;  // of columns
  int64_t width, out_width;
  int64_t begin, end;
  Activation activation;
  void* output;  // the first pixel of the row: they are `channels` apart
  bool output_bf16;
};

// Pixels, and what is added to each, or multiplied into it: another one, or the same for all.
struct CombinedPixels {
  const void *input, *other;  // other: may be null
  bool input_bf16, other_bf16;
  int64_t pixels, channels, other_apart;  // other_apart: elements from its one pixel to the next; 0 where it is one for all
  bool product;
  Activation activation;
  void* output;
  bool output_bf16;
};

// Pixels, of which each channel is multiplied by a number, and has one added. Distances count elements.
struct AffinePixels {
  const void* input;
  bool input_bf16;
  int64_t pixels, channels, apart;  // apart: from one pixel of `input` to the next
  const float *gain, *shift;        // [channels]
  Activation activation;
  void* output;  // its pixels are `channels` apart
  bool output_bf16;
};

struct PointwiseKernels {
  void (*grouped)(const GroupedRow&);
  void (*combine)(const CombinedPixels&);
  void (*affine)(const AffinePixels&);
  // sums[c] += channel c of `count` pixels that are so many elements apart.
  void (*add_pixels)(const void* pixels, bool bf16, int64_t count, int64_t apart, int64_t channels, float* sums);
  // to[c] = sums[c] * factor.
  void (*scale)(const float* sums, float factor, int64_t channels, void* to, bool to_bf16);
};

}  // namespace hfca
