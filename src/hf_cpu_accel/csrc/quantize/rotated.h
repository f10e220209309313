// Integer weights of linear layers, packed (packing/linear.py): plain data, no torch.
#pragma once
#include <cstdint>

namespace hfca {

constexpr int64_t panel_rows = 32;  // output features of a panel

// weight [rows, columns], dense, float32 or bfloat16 -> panels of its rotated rows, and scale and sum of the integers [rows]. group 0: int8,
// [columns / 4, 32, 4] bytes a panel; else the input features that share a multiplier of int4.
struct PackRotated {
  const void* weight = nullptr;
  bool is_bf16 = false;
  int64_t rows = 0, columns = 0, group = 0;
  uint8_t* data = nullptr;
  float *scale = nullptr, *sum = nullptr;

  // Features of a packed row, and bytes of a panel.
  int64_t features() const { return group == 0 ? (columns + 3) / 4 * 4 : (columns + group - 1) / group * group; }
  int64_t panel_bytes() const { return group == 0 ? panel_rows * features() : features() / group * (panel_rows + 16 * group); }
};

// A row, for one thread: values and bytes for all features up to the next multiple of 64, and a multiplier for each group.
struct RowScratch {
  float* values = nullptr;
  uint8_t* bytes = nullptr;
  int8_t* multiplier = nullptr;
};

// Panels [begin, end).
using PackRotatedKernel = void (*)(const PackRotated&, int64_t begin, int64_t end, const RowScratch&);

}  // namespace hfca
