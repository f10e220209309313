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
  int64_t origin = 0;  // where parts of the keys are counted from: what does not depend on how much of the text a cache still has
  // Set by plan_attention: each (sequence, key head) is cut into blocks of rows, or its keys into parts, which are shared out in runs.
  int64_t blocks = 1, parts = 1, runs = 1, first_task = 0, first_partial = 0;
  bool cut = false;

  int64_t rows() const { return attention.group * attention.q_len; }
  int64_t tasks() const { return blocks * runs; }  // per key head
  int64_t part_of(int64_t key) const { return (key - origin) / part_keys - (kv_begin - origin) / part_keys; }
  int64_t begin_of_part(int64_t part) const { return part == 0 ? kv_begin : origin + ((kv_begin - origin) / part_keys + part) * part_keys; }
  // The runs are alike, but the last one has all parts with keys of its queries: decoders write them there.
  int64_t first_part(int64_t run) const { return run == runs ? parts : run * most_runs() / runs; }
  int64_t most_runs() const {
    const Attention& a = attention;
    return part_of(a.causal ? std::max(a.kv_len - a.q_len, kv_begin) : kv_end - 1) + 1;
  }
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

// In how many runs the parts of each of `pairs` (sequence, key head) are shared out: in one unless threads would stand idle.
inline int64_t key_runs(int64_t pairs, int64_t most, int64_t threads) {
  for (int64_t runs = 1;; ++runs) {
    const int64_t tasks = pairs * runs, busiest = (tasks + threads - 1) / threads;
    if (8 * busiest * threads <= 9 * tasks || runs >= most) return runs;
  }
}

// Tasks are (sequence, key head, block of rows or run of parts of the keys), numbered in this order.
struct AttentionPlan {
  const AttentionSequence* sequences = nullptr;
  int64_t count = 0, kv_heads = 0, tasks = 0;
  int64_t scratch_floats = 0;  // per thread
  int64_t partial_floats = 0;  // of all sequences; 0: no keys are cut into several parts
  bool merges = false;  // after all tasks

  int64_t first_task(int64_t sequence) const { return sequence < count ? sequences[sequence].first_task : tasks; }
};

// The first key that a query may attend to, or a few before it.
inline int64_t first_aligned(const AttentionSequence& s) {
  const int64_t first = std::max(s.kv_begin, s.attention.first_key(0));
  return std::max(s.kv_begin, first - (first - s.origin) % key_alignment);
}

// cut_keys: run_attention is called for all tasks together. The keys of few queries are then cut at fixed places and put together in their
// order, so that a query's result depends neither on the other queries and sequences nor on the threads.
inline AttentionPlan plan_attention(AttentionSequence* sequences, int64_t count, int64_t kv_heads, int64_t threads, bool cut_keys) {
  const AttentionKernels& kernels = dispatch().kernels.attention;
  AttentionPlan plan{sequences, count, kv_heads};
  for (int64_t i = 0; i < count; ++i) {
    AttentionSequence& s = sequences[i];
    const int64_t rows = s.rows();
    const Attention& a = s.attention;
    s.cut = cut_keys && rows > 0 && a.q_len <= kernels.few_queries && a.global_keys == 0 && !a.positions;
    if (s.cut) {
      s.kv_begin = first_aligned(s);
      s.parts = s.kv_end > s.kv_begin ? s.part_of(s.kv_end - 1) + 1 : 1;
      s.runs = s.parts > 1 ? key_runs(count * kv_heads, s.most_runs(), threads) : 1;
      s.first_partial = plan.partial_floats;
      if (s.parts > 1) plan.partial_floats += kv_heads * s.parts * kernels.partial_floats(a, rows);
      plan.merges |= s.runs > 1;
    } else {
      s.blocks = row_blocks(count * kv_heads, rows, kernels.tile_rows, threads);
    }
    s.first_task = plan.tasks;
    plan.tasks += kv_heads * s.tasks();
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
  const AttentionKernels& kernels = dispatch().kernels.attention;
  if (s.cut) {
    task.cut = true, task.origin = s.origin;
    if (s.parts > 1) {
      const int64_t part = s.first_part(piece);
      task.kv_begin = s.begin_of_part(part);
      if (piece + 1 < s.runs) task.kv_end = s.begin_of_part(s.first_part(piece + 1));
      task.partial = partials + s.first_partial + (head * s.parts + part) * kernels.partial_floats(a, rows);
    }
  } else {
    task.row_begin = piece * rows / s.blocks, task.row_end = (piece + 1) * rows / s.blocks;
  }
  prepare(a, task);
  kernels.run(a, task, scratch);
  if (s.parts > 1 && s.runs == 1) kernels.merge(a, task, s.parts);
}

inline void run_attention_task(const AttentionPlan& plan, int64_t number, float* scratch) {
  run_attention_task(plan, number, scratch, nullptr, [](const Attention&, const AttentionTask&) {});
}

// All sequences, over the team. `scratch`: scratch_floats of this thread; `partials`: partial_floats of the plan.
template <class Prepare>
inline void run_attention(Team& team, const AttentionPlan& plan, float* scratch, float* partials, const Prepare& prepare) {
  team.claim(plan.tasks, [&](int64_t number) { run_attention_task(plan, number, scratch, partials, prepare); });
  if (!plan.merges) return;
  team.each(plan.count * plan.kv_heads, [&](int64_t begin, int64_t end) {
    for (int64_t pair = begin; pair < end; ++pair) {
      const AttentionSequence& s = plan.sequences[pair / plan.kv_heads];
      if (s.runs == 1) continue;
      const AttentionKernels& kernels = dispatch().kernels.attention;
      const int64_t head = pair % plan.kv_heads, rows = s.rows();
      AttentionTask first{s.batch, head, 0, rows, s.kv_begin, s.kv_end};
      first.partial = partials + s.first_partial + head * s.parts * kernels.partial_floats(s.attention, rows);
      kernels.merge(s.attention, first, s.parts);
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
  Workspace workspace(Workspace::size_of<float>(scratch * threads) + Workspace::size_of<float>(plan.partial_floats));
  float* memory = workspace.take<float>(scratch * threads);
  float* partials = workspace.take<float>(plan.partial_floats);
  run_team(threads, [&](Team& team) { run_attention(team, plan, memory + team.slot() * scratch, partials); });
}

}  // namespace hfca
