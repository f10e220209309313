// Attention of several sequences, each of its own length, spread over the threads of a team.
#pragma once
#include <algorithm>

#include "../dispatch.h"
#include "../team.h"
#include "../workspace.h"

namespace hfca {

// One sequence (or, where all are alike, one of the batch): what to compute and which keys there are.
struct AttentionSequence {
  Attention attention;
  int64_t batch = 0, kv_begin = 0, kv_end = 0;
  int64_t blocks = 1, first_task = 0;  // set by plan_attention
};

// Into how many blocks the rows of each of `pairs` (sequence, key head) are cut: as few as possible, since each packs the keys again,
// but enough to give every thread its share. Cost of the busiest thread, in rows; packing costs about as much as a few rows.
inline int64_t row_blocks(int64_t pairs, int64_t rows, int64_t tile_rows, int64_t threads) {
  constexpr int64_t most_rows = 384, packing_rows = 8;  // 384 rows of 64 features: 200 KB of scratch
  const int64_t fewest = (rows + most_rows - 1) / most_rows, most = std::min((rows + tile_rows - 1) / tile_rows, fewest + 2 * threads);
  int64_t best = fewest, best_cost = INT64_MAX;
  for (int64_t blocks = std::max<int64_t>(fewest, 1); blocks <= most; ++blocks) {
    const int64_t cost = (pairs * blocks + threads - 1) / threads * ((rows + blocks - 1) / blocks + packing_rows);
    if (cost < best_cost) best = blocks, best_cost = cost;
  }
  return best;
}

// Tasks are (sequence, key head, block of rows), numbered in this order.
struct AttentionPlan {
  const AttentionSequence* sequences = nullptr;
  int64_t count = 0, kv_heads = 0, tasks = 0;
  int64_t scratch_floats = 0;  // per thread

  int64_t first_task(int64_t sequence) const { return sequence < count ? sequences[sequence].first_task : tasks; }
};

inline AttentionPlan plan_attention(AttentionSequence* sequences, int64_t count, int64_t kv_heads, int64_t threads) {
  const AttentionKernels& kernels = dispatch().attention;
  AttentionPlan plan{sequences, count, kv_heads};
  for (int64_t i = 0; i < count; ++i) {
    AttentionSequence& s = sequences[i];
    const int64_t rows = s.attention.group * s.attention.q_len;
    s.blocks = row_blocks(count * kv_heads, rows, kernels.tile_rows, threads);
    s.first_task = plan.tasks;
    plan.tasks += kv_heads * s.blocks;
    if (s.blocks > 0)
      plan.scratch_floats = std::max(plan.scratch_floats, kernels.scratch_floats(s.attention, (rows + s.blocks - 1) / s.blocks));
  }
  return plan;
}

inline void run_attention_task(const AttentionPlan& plan, int64_t task, float* scratch) {
  const AttentionSequence* end = plan.sequences + plan.count;
  const AttentionSequence& s =
      *(std::upper_bound(plan.sequences, end, task, [](int64_t t, const AttentionSequence& x) { return t < x.first_task; }) - 1);
  const Attention a = s.attention;  // see run_gemm
  const int64_t rows = a.group * a.q_len, pair = (task - s.first_task) / s.blocks, block = (task - s.first_task) % s.blocks;
  dispatch().attention.run(a, {s.batch, pair, block * rows / s.blocks, (block + 1) * rows / s.blocks, s.kv_begin, s.kv_end}, scratch);
}

// All sequences, over the team. `scratch`: scratch_floats of this thread.
inline void run_attention(Team& team, const AttentionPlan& plan, float* scratch) {
  team.claim(plan.tasks, [&](int64_t task) { run_attention_task(plan, task, scratch); });
}

}  // namespace hfca
