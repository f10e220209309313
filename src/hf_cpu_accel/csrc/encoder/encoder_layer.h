// A whole transformer encoder layer (Vaswani et al. 2017, arXiv:1706.03762) in one fork:
//
//   norm after (BERT):  y = norm1(x + output(attention(qkv(x)))),   result = norm2(y + down(activation(up(y))))
//   norm before (ViT):  y = x + output(attention(qkv(norm1(x)))),   result = y + down(activation(up(norm2(y))))
//
// up may be gated; with norms before, branches may be multiplied by a layer scale for each feature before they are added, and norm1 may be missing.
//
// It is shared out in one of two ways:
//   steps      all threads work on each step, which is cut along tokens and output features, and meet after it.
//   sequences  where there are many: each thread takes blocks of whole sequences from end to end, attention included, so that what
//              passes between two weights stays in its own L2 cache, and the threads do not meet at all.
// Blocks of tokens of one long sequence, with a meeting before and after attention, were measured too: 5 to 10 % slower than steps.
//
// The sums that residuals are added to are float32 for every input type. What only feeds the next product or attention may be
// bfloat16 (`bf16_intermediates`): for bfloat16 and int8 weights it is rounded as coarsely there anyway, and half the bytes are half the
// time. For the same reason attention may then multiply in integers between int8 weights (attention/arithmetic_int8.h).
#pragma once
#include <vector>

#include "../attention/driver.h"
#include "../gemm/driver.h"
#include "../norm/optional_norm.h"
#include "token_rows.h"

namespace hfca {

struct EncoderLayer {
  Gemm qkv, output, up, down;  // the weight sides
  OptionalNorm attention_norm, ffn_norm;
  Array attention_layer_scale, ffn_layer_scale;  // [features]; data may be null
  Rotation rotation;  // of queries and keys; half 0: none
  bool pre_norm = false, bf16_intermediates = false;
  Matrix input, result;  // a row per token, padding left out by their index
  Matrix query, key, value, context;  // [tokens, attention_features]
  int64_t tokens = 0, features = 0, attention_features = 0, intermediate_features = 0;

  size_t element() const { return bf16_intermediates ? sizeof(uint16_t) : sizeof(float); }
  Matrix take(Workspace& workspace, int64_t rows, int64_t columns) const {
    return {workspace.take<char>(rows * columns * static_cast<int64_t>(element())), columns, bf16_intermediates};
  }
  size_t size_of(int64_t rows, int64_t columns) const { return Workspace::size_of<char>(rows * columns * static_cast<int64_t>(element())); }
};

struct TokenBlock {
  int64_t begin, count;
  int64_t first_sequence = 0, end_sequence = 0;  // where blocks are whole sequences
};

inline Matrix rows_from(Matrix x, int64_t row) {
  if (x.index) x.index += row;
  else x.data = static_cast<char*>(x.data) + row * x.stride * static_cast<int64_t>(x.bf16 ? sizeof(uint16_t) : sizeof(float));
  return x;
}

// How a layer is shared out.
struct EncoderPlan {
  std::vector<TokenBlock> blocks;  // one: steps
  int64_t threads, block_tokens = 0;  // of the largest block
  int64_t input_words = 0;  // of the widest GEMM
  int64_t scratch_floats;  // per thread, for norms and attention

  EncoderPlan(const EncoderLayer& layer, const AttentionPlan& attention, int64_t team) : threads(team) {
    for (const Gemm* g : {&layer.qkv, &layer.output, &layer.up, &layer.down}) input_words = std::max(input_words, most_input_words(*g));
    scratch_floats = (std::max(attention.scratch_floats, norm_buffer_rows * layer.features) + 15) / 16 * 16;
    const int64_t token_bytes =
        4 * (input_words + 2 * layer.features) + static_cast<int64_t>(layer.element()) * layer.intermediate_features;
    take_sequences(attention, std::max(level2_bytes() / 2 / token_bytes, 3 * least_tokens));
    if (blocks.empty()) blocks.push_back({0, layer.tokens});
    for (const TokenBlock& block : blocks) block_tokens = std::max(block_tokens, block.count);
  }

  bool by_steps() const { return blocks.size() == 1; }
  int64_t memories() const { return by_steps() ? 1 : threads; }

 private:
  static constexpr int64_t least_tokens = 40;  // per block: each block reads all weights

  // Blocks of whole sequences, if they keep all threads busy to the end and are neither too small nor too large.
  void take_sequences(const AttentionPlan& attention, int64_t in_cache) {
    int64_t total = 0, largest = 0;
    for (int64_t s = 0; s < attention.count; ++s) {
      const int64_t tokens = attention.sequences[s].attention.q_len;
      if (blocks.empty() || blocks.back().count + tokens > in_cache) blocks.push_back({total, 0, s, s});
      blocks.back().count += tokens;
      blocks.back().end_sequence = s + 1;
      total += tokens;
      largest = std::max(largest, blocks.back().count);
    }
    // Each thread takes the next block when it is done with the last.
    std::vector<int64_t> busy(static_cast<size_t>(threads));
    for (const TokenBlock& block : blocks) *std::min_element(busy.begin(), busy.end()) += block.count;
    const int64_t longest = *std::max_element(busy.begin(), busy.end()), count = static_cast<int64_t>(blocks.size());
    if (count == 1 || largest > 8 * in_cache || total < least_tokens * count || 10 * total < 9 * threads * longest) blocks.clear();
  }
};

// What one block needs between its steps.
struct BlockMemory {
  GemmMemory gemm;
  Matrix intermediate, sum, normed;

  static size_t size_of(const EncoderLayer& layer, const EncoderPlan& plan) {
    return GemmMemory::size_of(plan.block_tokens, plan.input_words) + layer.size_of(plan.block_tokens, layer.intermediate_features) +
           2 * Workspace::size_of<float>(plan.block_tokens * layer.features);
  }
  BlockMemory(Workspace& workspace, const EncoderLayer& layer, const EncoderPlan& plan)
      : gemm(workspace, plan.block_tokens, plan.input_words),
        intermediate(layer.take(workspace, plan.block_tokens, layer.intermediate_features)),
        sum{workspace.take<float>(plan.block_tokens * layer.features), layer.features},
        normed{workspace.take<float>(plan.block_tokens * layer.features), layer.features} {}
};

// query, key and value of a block of tokens.
inline void project(const Team& team, const EncoderLayer& layer, TokenBlock tokens, const BlockMemory& memory, float* scratch) {
  Gemm qkv = layer.qkv;
  qkv.m = tokens.count;
  qkv.input = rows_from(layer.input, tokens.begin);
  for (Matrix* output = qkv.outputs; output != qkv.outputs + 3; ++output) *output = rows_from(*output, tokens.begin);
  if (layer.pre_norm && layer.attention_norm.exists()) {
    const Matrix input = qkv.input, normed = memory.normed;
    qkv.input = normed;
    run_gemm(team, qkv, memory.gemm, [&](int64_t row, int rows) { layer.attention_norm.run(input, normed, row, row + rows, scratch); });
  } else {
    run_gemm(team, qkv, memory.gemm);
  }
  if (layer.rotation.half == 0) return;
  team.each(tokens.count, [&](int64_t begin, int64_t end) {
    for (const Matrix& x : {layer.query, layer.key})
      dispatch().kernels.token_rows.rotate(layer.rotation, x, tokens.begin + begin, tokens.begin + end);
  });
}

// The rest of the layer, from the attended values of a block of tokens to its result.
inline void transform(const Team& team, const EncoderLayer& layer, TokenBlock tokens, const BlockMemory& memory, float* scratch) {
  const TokenRowKernels& steps = dispatch().kernels.token_rows;
  const Matrix sum = memory.sum, normed = memory.normed, intermediate = memory.intermediate;
  const Matrix input = rows_from(layer.input, tokens.begin), result = rows_from(layer.result, tokens.begin);

  Gemm output = layer.output;
  output.m = tokens.count;
  output.input = rows_from(layer.context, tokens.begin);
  if (!layer.attention_layer_scale.data) output.residual = input;
  output.write_to(sum);
  run_gemm(team, output, memory.gemm);

  const OptionalNorm& between = layer.pre_norm ? layer.ffn_norm : layer.attention_norm;
  Gemm up = layer.up;
  up.m = tokens.count;
  up.input = normed;
  up.write_to(intermediate);
  if (up.gated) up.outputs[1] = intermediate, up.output_begin[1] = layer.intermediate_features, up.output_begin[2] = up.n;
  run_gemm(team, up, memory.gemm, [&](int64_t row, int rows) {
    if (layer.attention_layer_scale.data) steps.add_scaled(input, sum, layer.attention_layer_scale, sum, layer.features, row, row + rows);
    between.run(sum, normed, row, row + rows, scratch);
  });

  const bool added_last = layer.ffn_layer_scale.data;
  Gemm down = layer.down;
  down.m = tokens.count;
  down.input = intermediate;
  if (!added_last) down.residual = layer.pre_norm ? sum : normed;
  down.write_to(added_last ? normed : layer.pre_norm ? result : sum);
  run_gemm(team, down, memory.gemm);
  if (layer.pre_norm && !added_last) return;
  team.each(tokens.count, [&](int64_t begin, int64_t end) {
    if (added_last) steps.add_scaled(sum, normed, layer.ffn_layer_scale, result, layer.features, begin, end);
    else layer.ffn_norm.run(sum, result, begin, end, scratch);
  });
}

// memories: plan.memories() of them; scratch: scratch_floats for each thread.
inline void run_layer(Team& team, const EncoderLayer& shared, const EncoderPlan& plan, const AttentionPlan& attention,
                      const BlockMemory* memories, float* scratch) {
  const EncoderLayer layer = shared;  // see run_gemm
  float* mine = scratch + team.slot() * plan.scratch_floats;
  pack_positions(team, attention);
  if (plan.by_steps()) {
    project(team, layer, plan.blocks[0], memories[0], mine);
    run_attention(team, attention, mine);
    return transform(team, layer, plan.blocks[0], memories[0], mine);
  }
  const BlockMemory memory = memories[team.slot()];
  const Team alone = team.alone();
  team.claim(static_cast<int64_t>(plan.blocks.size()), [&](int64_t i) {
    const TokenBlock block = plan.blocks[static_cast<size_t>(i)];
    project(alone, layer, block, memory, mine);
    const int64_t end = attention.first_task(block.end_sequence);
    for (int64_t task = attention.first_task(block.first_sequence); task < end; ++task) run_attention_task(attention, task, mine);
    transform(alone, layer, block, memory, mine);
  });
}

}  // namespace hfca
