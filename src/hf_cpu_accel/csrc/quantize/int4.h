// The search for four-bit weights (packing/int4.py): plain data, no torch.
#pragma once
#include <cstdint>

namespace hfca {

// weight [rows, columns] float32 -> index [rows, columns], multiplier [rows, columns / group], scale and sum (of multiplier * level) [rows]; all dense.
struct QuantizeInt4 {
  const float* weight = nullptr;
  int64_t columns = 0, group = 32;
  uint8_t* index = nullptr;
  int8_t* multiplier = nullptr;
  float *scale = nullptr, *sum = nullptr;
};

// Rows [begin, end).
using QuantizeInt4Kernel = void (*)(const QuantizeInt4&, int64_t begin, int64_t end);

}  // namespace hfca
