#include "tile_check.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace hfca {
namespace {

// More than a tile of rows, the rest of one along k, and the rest of a panel.
constexpr int64_t rows = 20, features = 40, depth = 200, panels = (features + panel_columns - 1) / panel_columns;

// Small integers: all sums of them are exact, in whatever order they are added.
int small(int64_t i) { return static_cast<int>(i * 7 % 17) - 8; }

uint32_t as_bf16(int x) {
  const auto value = static_cast<float>(x);
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits >> 16;
}

// A packed weight, its padding zero.
std::vector<uint32_t> weight_of(WeightKind kind, int64_t words) {
  std::vector<uint32_t> weight(static_cast<size_t>(panels * words * panel_columns));
  for (size_t i = 0; i < weight.size(); ++i) {
    const int64_t column = static_cast<int64_t>(i) / panel_columns / words * panel_columns + static_cast<int64_t>(i) % panel_columns;
    if (column >= features) continue;
    const auto at = static_cast<int64_t>(4 * i);
    if (kind == WeightKind::bfloat16) weight[i] = as_bf16(small(at)) | as_bf16(small(at + 1)) << 16;
    else
      for (int64_t byte = 0; byte < 4; ++byte) weight[i] |= (static_cast<uint32_t>(small(at + byte)) & 0xFF) << 8 * byte;
  }
  return weight;
}

std::vector<float> product(const GemmKernels& kernels, Gemm g) {
  std::vector<float> output(static_cast<size_t>(rows * features)), steps(2 * rows);
  g.input_words = kernels.input_words(g);
  std::vector<uint32_t> words(static_cast<size_t>(rows * g.input_words));
  g.write_to({output.data(), features});
  g.words = words.data(), g.input_scale = steps.data(), g.input_zero = steps.data() + rows;
  if (kernels.enter) kernels.enter();
  for (int64_t row = 0; row < rows; row += kernels.tile_rows) {
    const int height = static_cast<int>(std::min<int64_t>(kernels.tile_rows, rows - row));
    kernels.pack_rows(g, row, height);
    for (int64_t panel = 0; panel < panels; ++panel) {
      const char* const weight = static_cast<const char*>(g.weight) + panel * kernels.panel_bytes(g);
      kernels.compute(g, row, height, panel, weight, {weight, 0}, {0, g.input_words, nullptr, true});
    }
  }
  if (kernels.leave) kernels.leave();
  return output;
}

}  // namespace

bool tiles_agree(const Kernels& tiles, const Kernels& below) {
  std::vector<float> input(static_cast<size_t>(rows * depth)), scale(2 * features, 0.25f);
  for (size_t i = 0; i < input.size(); ++i) input[i] = static_cast<float>(small(static_cast<int64_t>(i)));
  for (WeightKind kind : {WeightKind::bfloat16, WeightKind::int8, WeightKind::int8_weight}) {
    Gemm g;
    g.m = rows, g.n = features, g.k = depth, g.kind = kind, g.input = {input.data(), depth};
    g.weight_scale = scale.data(), g.weight_sum = scale.data() + features;
    const std::vector<uint32_t> weight = weight_of(kind, depth / (kind == WeightKind::bfloat16 ? 2 : 4));
    g.weight = weight.data();
    const int at = static_cast<int>(kind);
    const std::vector<float> ours = product(tiles.gemm_of_many_rows[at], g), expected = product(below.gemm[at], g);
    if (std::memcmp(ours.data(), expected.data(), ours.size() * sizeof(float)) != 0) return false;
  }
  return true;
}

}  // namespace hfca
