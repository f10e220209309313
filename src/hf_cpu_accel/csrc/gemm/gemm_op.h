// GEMMs that are an op of their own: memory, threads and blocks of rows.
#pragma once
#include <algorithm>
#include <vector>

#include "driver.h"
#include "row_blocks.h"

namespace hfca {

// One GEMM on its own.
inline void run_gemm_op(const Gemm& g) {
  const int64_t words = most_input_words(g), threads = team_size(multiply_adds(g));
  const RowBlocks blocks(g.m, words, threads);
  Workspace workspace(static_cast<size_t>(blocks.memories(threads)) * GemmMemory::size_of(blocks.most_rows(), words));
  std::vector<GemmMemory> memory;
  memory.reserve(static_cast<size_t>(blocks.memories(threads)));
  for (int64_t i = 0; i < blocks.memories(threads); ++i) memory.emplace_back(workspace, blocks.most_rows(), words);
  run_team(threads, [&](Team& team) {
    blocks.each(team, [&](const Team& workers, int64_t slot, int64_t row, int64_t rows) {
      run_gemm(workers, rows_of(g, row, rows), memory[static_cast<size_t>(slot)]);
    });
  });
}

// Two of them, the second one on what the first one makes of its rows, which stays in float32 workspace memory.
inline void run_gemm_pair(const Gemm& first, const Gemm& second) {
  const int64_t between = second.k, words = std::max(most_input_words(first), most_input_words(second));
  const int64_t threads = team_size(multiply_adds(first) + multiply_adds(second));
  const RowBlocks blocks(first.m, words + between, threads);
  const int64_t memories = blocks.memories(threads), rows_at_once = blocks.most_rows();
  Workspace workspace(static_cast<size_t>(memories) *
                      (GemmMemory::size_of(rows_at_once, words) + Workspace::size_of<float>(rows_at_once * between)));
  std::vector<GemmMemory> memory;
  std::vector<float*> intermediate;
  memory.reserve(static_cast<size_t>(memories)), intermediate.reserve(static_cast<size_t>(memories));
  for (int64_t i = 0; i < memories; ++i) {
    memory.emplace_back(workspace, rows_at_once, words);
    intermediate.push_back(workspace.take<float>(rows_at_once * between));
  }
  run_team(threads, [&](Team& team) {
    blocks.each(team, [&](const Team& workers, int64_t slot, int64_t row, int64_t rows) {
      Gemm up = rows_of(first, row, rows), down = rows_of(second, row, rows);
      down.input = {intermediate[static_cast<size_t>(slot)], between, false};
      up.write_to(down.input);
      if (up.gated) up.outputs[1] = down.input, up.output_begin[1] = between, up.output_begin[2] = up.n;
      run_gemm(workers, up, memory[static_cast<size_t>(slot)]);
      run_gemm(workers, down, memory[static_cast<size_t>(slot)]);
    });
  });
}

}  // namespace hfca
