// conv2d: activation(convolution + bias + residual). Schema, checks, call.
#include <algorithm>
#include <vector>

#include "convolution/patches.h"
#include "gemm/arguments.h"
#include "gemm/driver.h"
#include "gemm/row_blocks.h"
#include "tensors.h"

namespace hfca {
namespace {

constexpr const char* op = "conv2d";

WindowSide side_of(const std::vector<int64_t>& size, const std::vector<int64_t>& stride, const std::vector<int64_t>& padding,
                   const std::vector<int64_t>& dilation, size_t side) {
  constexpr int64_t most = 1 << 20;  // keeps all positions far within an int64
  const WindowSide found{size[side], stride[side], padding[side], dilation[side]};
  STD_TORCH_CHECK(found.size >= 1 && found.stride >= 1 && found.padding >= 0 && found.dilation >= 1 && found.size <= most && found.stride <= most &&
                      found.padding <= most && found.dilation <= most,
                  "hf_cpu_accel::", op, ": kernel_size, stride and dilation must be positive and padding not negative");
  return found;
}

// The GEMM of patches and weights. Each thread gathers the rows of a tile into memory of its own right before it packs them.
void run_patches(Gemm g, const Patches& patches) {
  const int64_t words = input_words(g), threads = team_size(multiply_adds(g)), tile_rows = kernels_of(g).tile_rows;
  const RowBlocks blocks(g.m, words, threads);
  const bool gathers = !patches.are_pixels();
  const int64_t memories = blocks.memories(threads), rows = blocks.most_rows(), patch = gathers ? patches.bytes() : 0;
  Workspace workspace(static_cast<size_t>(memories) * (GemmMemory::size_of(rows, words) + Workspace::size_of<int32_t>(rows)) +
                      Workspace::size_of<char>(threads * tile_rows * patch));
  std::vector<GemmMemory> memory;
  std::vector<int32_t*> indexes;  // of the rows of a block: where in `gathered` they are while they are packed
  for (int64_t i = 0; i < memories; ++i) {
    memory.emplace_back(workspace, rows, words);
    indexes.push_back(workspace.take<int32_t>(rows));
  }
  char* const gathered = workspace.take<char>(threads * tile_rows * patch);
  if (gathers) g.input = {gathered, g.k, g.input.bf16};
  run_team(threads, [&](Team& team) {
    blocks.each(team, [&](const Team& workers, int64_t slot, int64_t row, int64_t count) {
      Gemm part = rows_of(g, row, count);
      if (!gathers) return run_gemm(workers, part, memory[static_cast<size_t>(slot)]);
      int32_t* const index = indexes[static_cast<size_t>(slot)];
      part.input = g.input, part.input.index = index;
      const int64_t mine = workers.slot() * tile_rows;
      run_gemm(workers, part, memory[static_cast<size_t>(slot)], [&](int64_t first, int height) {
        for (int64_t i = 0; i < height; ++i) {
          index[first + i] = static_cast<int32_t>(mine + i);
          patches.gather(row + first + i, gathered + (mine + i) * patch);
        }
      });
    });
  });
}

Tensor conv2d(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& scale, const std::optional<Tensor>& bias,
              const std::optional<Tensor>& residual, int64_t out_channels, const std::vector<int64_t>& kernel_size, const std::vector<int64_t>& stride,
              const std::vector<int64_t>& padding, const std::vector<int64_t>& dilation, const std::string& activation) {
  check_floating(input, op, "input");
  STD_TORCH_CHECK(input.dim() == 4, "hf_cpu_accel::", op, ": input must be [batch, height, width, channels]");
  STD_TORCH_CHECK(kernel_size.size() == 2 && stride.size() == 2 && padding.size() == 2 && dilation.size() == 2, "hf_cpu_accel::", op,
                  ": kernel_size, stride, padding and dilation must have two numbers each");
  Patches patches;
  patches.height = input.size(1), patches.width = input.size(2);
  patches.rows = side_of(kernel_size, stride, padding, dilation, 0), patches.columns = side_of(kernel_size, stride, padding, dilation, 1);
  patches.out_height = patches.rows.outputs(patches.height), patches.out_width = patches.columns.outputs(patches.width);
  STD_TORCH_CHECK(patches.out_height > 0 && patches.out_width > 0, "hf_cpu_accel::", op, ": the window is larger than the padded input of ",
                  patches.height, " x ", patches.width);
  const int64_t channels = input.size(3), element = static_cast<int64_t>(input.element_size());
  Gemm g = gemm_of(op, input.size(0) * patches.out_height * patches.out_width, out_channels, patches.rows.size * patches.columns.size * channels, weight,
                   scale, bias, activation_of(activation, op));
  Tensor output = empty_of(input, {input.size(0), patches.out_height, patches.out_width, out_channels});
  Tensor keep_input = input, keep_residual = input;
  g.input = as_rows(input, keep_input);
  patches.data = static_cast<const char*>(g.input.data);
  patches.pixel_bytes = g.input.stride * element, patches.channel_bytes = channels * element;
  if (residual) {
    check_floating(*residual, op, "residual");
    STD_TORCH_CHECK(sizes_of(*residual) == sizes_of(output), "hf_cpu_accel::", op, ": residual must have the output's shape");
    g.residual = as_rows(*residual, keep_residual), g.activates_sum = true;
  }
  g.write_to({output.mutable_data_ptr(), out_channels, is_bf16(output)});
  if (output.numel() > 0) run_patches(g, patches);
  return output;
}

}  // namespace
}  // namespace hfca

STABLE_TORCH_LIBRARY_FRAGMENT(hf_cpu_accel, m) {
  m.def(
      "conv2d(Tensor input, Tensor weight, Tensor? scale, Tensor? bias, Tensor? residual, SymInt out_channels, int[] kernel_size, "
      "int[] stride, int[] padding, int[] dilation, str activation) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(hf_cpu_accel, CPU, m) { m.impl("conv2d", TORCH_BOX(&hfca::conv2d)); }
