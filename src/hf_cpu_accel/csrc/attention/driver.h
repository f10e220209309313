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
  // Set by plan_attention: each (sequence, key head) is cut into blocks of rows, or its keys into parts.
  int64_t blocks = 1, parts = 1, first_task = 0;

  int64_t rows() const { return attention.group * attention.q_len; }
  int64_t tasks() const { return blocks * parts; }  // per key head
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

// Into how many parts the keys of each of `pairs` (sequence, key head) are cut where few rows read many keys: none unless threads
// would stand idle, for the parts have to be put together again.
inline int64_t key_parts(int64_t pairs, int64_t keys, int64_t threads) {
  constexpr int64_t least_keys = 128;
  for (int64_t parts = 1;; ++parts) {
    const int64_t tasks = pairs * parts, busiest = (tasks + threads - 1) / threads;
    if (8 * busiest * threads <= 9 * tasks || keys < (parts + 1) * least_keys) return parts;
  }
}

// Tasks are (sequence, key head, block of rows or part of the keys), numbered in this order.
struct AttentionPlan {
  const AttentionSequence* sequences = nullptr;
  int64_t count = 0, kv_heads = 0, tasks = 0;
  int64_t scratch_floats = 0;  // per thread
  int64_t partial_floats = 0;  // per task; 0: no keys are cut into parts

  int64_t first_task(int64_t sequence) const { return sequence < count ? sequences[sequence].first_task : tasks; }
};

// cut_keys: run_attention is called for all tasks together.
inline AttentionPlan plan_attention(AttentionSequence* sequences, int64_t count, int64_t kv_heads, int64_t threads, bool cut_keys) {
  const AttentionKernels& kernels = dispatch().kernels.attention;
  AttentionPlan plan{sequences, count, kv_heads};
  for (int64_t i = 0; i < count; ++i) {
    AttentionSequence& s = sequences[i];
    const int64_t rows = s.rows();
    const bool few = cut_keys && rows > 0 && rows <= kernels.few_rows;
    s.blocks = few ? 1 : row_blocks(count * kv_heads, rows, kernels.tile_rows, threads);
    s.parts = few ? key_parts(count * kv_heads, s.kv_end - std::max(s.kv_begin, s.attention.first_key(0)), threads) : 1;
    s.first_task = plan.tasks;
    plan.tasks += kv_heads * s.tasks();
    if (s.parts > 1) plan.partial_floats = std::max(plan.partial_floats, kernels.partial_floats(s.attention, rows));
    if (s.blocks > 0)
      plan.scratch_floats = std::max(plan.scratch_floats, kernels.scratch_floats(s.attention, (rows + s.blocks - 1) / s.blocks));
  }
  return plan;
}

// Before the tasks of sequences with relative positions, which share their tables.
inline void pack_positions(const Team& team, const AttentionPlan& plan) {
  if (plan.count == 0 || !plan.sequences->attention.positions || plan.sequences->attention.positions->is_packed) return;
  team.each(plan.kv_heads, [&](int64_t begin, int64_t end) {
    for (int64_t head = begin; head < end; ++head) dispatch().kernels.attention.pack_positions(plan.sequences->attention, head);
  });
}

// prepare(attention, task): what is to be done before, in which the attention may be changed for this task.
template <class Prepare>
inline void run_attention_task(const AttentionPlan& plan, int64_t number, float* scratch, float* partials, const Prepare& prepare) {
  const AttentionSequence* end = plan.sequences + plan.count;
  const AttentionSequence& s =
      *(std::upper_bound(plan.sequences, end, number, [](int64_t t, const AttentionSequence& x) { return t < x.first_task; }) - 1);
  Attention a = s.attention;  // see run_gemm
  const int64_t rows = s.rows(), head = (number - s.first_task) / s.tasks(), piece = (number - s.first_task) % s.tasks();
  AttentionTask task{s.batch, head, 0, rows, s.kv_begin, s.kv_end};
  if (s.parts > 1) {
    const int64_t first = std::max(s.kv_begin, a.first_key(0)), keys = s.kv_end - first;
    task.kv_begin = first + piece * keys / s.parts, task.kv_end = first + (piece + 1) * keys / s.parts;
    task.partial = partials + number * plan.partial_floats;
  } else {
    task.row_begin = piece * rows / s.blocks, task.row_end = (piece + 1) * rows / s.blocks;
  }
  prepare(a, task);
  dispatch().kernels.attention.run(a, task, scratch);
}

inline void run_attention_task(const AttentionPlan& plan, int64_t number, float* scratch) {
  run_attention_task(plan, number, scratch, nullptr, [](const Attention&, const AttentionTask&) {});
}

// All sequences, over the team. `scratch`: scratch_floats of this thread; `partials`: partial_floats for each task of the plan.
template <class Prepare>
inline void run_attention(Team& team, const AttentionPlan& plan, float* scratch, float* partials, const Prepare& prepare) {
  team.claim(plan.tasks, [&](int64_t number) { run_attention_task(plan, number, scratch, partials, prepare); });
  if (plan.partial_floats == 0) return;
  team.each(plan.count * plan.kv_heads, [&](int64_t begin, int64_t end) {
    for (int64_t pair = begin; pair < end; ++pair) {
      const AttentionSequence& s = plan.sequences[pair / plan.kv_heads];
      if (s.parts == 1) continue;
      const int64_t head = pair % plan.kv_heads, number = s.first_task + head * s.parts;
      const AttentionTask first{s.batch, head, 0, s.rows(), s.kv_begin, s.kv_end, partials + number * plan.partial_floats};
      dispatch().kernels.attention.merge(s.attention, first, s.parts);
    }
  });
}

inline void run_attention(Team& team, const AttentionPlan& plan, float* scratch, float* partials = nullptr) {
  run_attention(team, plan, scratch, partials, [](const Attention&, const AttentionTask&) {});
}

// All sequences in a fork of its own.
inline void run_attention(std::vector<AttentionSequence>& sequences, int64_t kv_heads) {
  double work = 0;
  for (const AttentionSequence& s : sequences) {
    const Attention& a = s.attention;
    work += static_cast<double>(kv_heads * a.group * a.q_len) * static_cast<double>(a.kv_len * (a.head_dim + a.value_dim));
  }
  const int64_t threads = team_size(work);
  const AttentionPlan plan = plan_attention(sequences.data(), static_cast<int64_t>(sequences.size()), kv_heads, threads, true);
  const int64_t scratch = (plan.scratch_floats + 15) / 16 * 16;
  Workspace workspace(Workspace::size_of<float>(scratch * threads) + Workspace::size_of<float>(plan.partial_floats * plan.tasks));
  float* memory = workspace.take<float>(scratch * threads);
  float* partials = workspace.take<float>(plan.partial_floats * plan.tasks);
  run_team(threads, [&](Team& team) { run_attention(team, plan, memory + team.slot() * scratch, partials); });
}

}  // namespace hfca
