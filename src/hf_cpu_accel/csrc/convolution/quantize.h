// Images in bytes, for convolutions in int8: plain data, no torch.
#pragma once
#include "../gemm/gemm.h"

namespace hfca {

// Both take pixels [begin, end) of an image whose pixels have a multiple of 64 channels.
struct QuantizeImageKernels {
  // The least and the largest of their values and 0; NaN if there is one.
  void (*range)(const Matrix& pixels, int64_t channels, int64_t begin, int64_t end, float* low_high);
  ByteSteps (*steps)(float low, float high);
  // Of a range that is known beforehand: what is outside of it becomes the byte at its end.
  ByteSteps (*steps_of_known)(float low, float high);
  void (*quantize)(const Matrix& pixels, int64_t channels, int64_t begin, int64_t end, const ByteSteps& with, uint8_t* to);
};

}  // namespace hfca
