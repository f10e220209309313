// A whole transformer encoder layer (Vaswani et al. 2017, arXiv:1706.03762) in one fork:
//
//   norm after (BERT):  y = norm1(x + output(attention(qkv(x)))),   result = norm2(y + down(activation(up(y))))
//   norm before (ViT):  y = x + output(attention(qkv(norm1(x)))),   result = y + down(activation(up(norm2(y))))
//
// It is shared out in one of two ways. Few tokens: all threads work on each step, which is cut along the output features, and meet
// after it. Many tokens: each thread takes blocks of tokens from end to end, so that what passes between two weights stays in its own
// L2 cache, and the threads meet before and after attention only. What passes between the steps is float32 for every input type.
#pragma once
#include <vector>

#include "../attention/driver.h"
#include "../gemm/driver.h"

namespace hfca {

struct EncoderLayer {
  Gemm qkv, output, up, down;     // the weight sides
  Norm attention_norm, ffn_norm;  // weights and eps
  bool norm_before = false;
  Matrix input, result;           // a row per token, padding left out by their index
  int64_t tokens = 0, features = 0, attention_features = 0;
  float *query = nullptr, *key = nullptr, *value = nullptr, *context = nullptr;  // [tokens, attention_features]
};

struct TokenBlock {
  int64_t begin, count;
};

inline Matrix rows_from(Matrix x, int64_t row) {
  if (x.index) x.index += row;
  else x.data = static_cast<char*>(x.data) + row * x.stride * static_cast<int64_t>(x.bf16 ? sizeof(uint16_t) : sizeof(float));
  return x;
}

// How a layer is shared out, and the memory that it takes.
struct EncoderPlan {
  int64_t threads, blocks, block_tokens;  // one block: all threads work on each step
  int64_t input_words, scratch_floats;    // of the widest GEMM; per thread, for norms and attention

  EncoderPlan(const EncoderLayer& layer, const AttentionPlan& attention, int64_t team) : threads(team) {
    constexpr int64_t least_tokens = 40;  // per block: each block reads all weights
    input_words = 0;
    for (const Gemm* g : {&layer.qkv, &layer.output, &layer.up, &layer.down}) input_words = std::max(input_words, hfca::input_words(*g));
    const int64_t token_bytes = 4 * (layer.up.n + input_words + 2 * layer.features);
    const int64_t in_cache = std::max(level2_bytes() / token_bytes, least_tokens);
    const int64_t share = (layer.tokens + threads - 1) / threads;
    blocks = share < least_tokens ? 1 : threads * ((share + in_cache - 1) / in_cache);
    block_tokens = (layer.tokens + blocks - 1) / blocks;
    scratch_floats = (std::max(attention.scratch_floats, norm_buffer_rows * layer.features) + 15) / 16 * 16;
  }

  bool by_blocks() const { return blocks > 1; }
  int64_t memories() const { return by_blocks() ? threads : 1; }
  TokenBlock block(int64_t i, int64_t tokens) const { return {i * tokens / blocks, (i + 1) * tokens / blocks - i * tokens / blocks}; }
};

// What one block needs between its steps.
struct BlockMemory {
  GemmMemory gemm;
  float *intermediate, *sum, *normed;

  static size_t size_of(const EncoderLayer& layer, const EncoderPlan& plan) {
    return GemmMemory::size_of(plan.block_tokens, plan.input_words) + Workspace::size_of<float>(plan.block_tokens * layer.up.n) +
           2 * Workspace::size_of<float>(plan.block_tokens * layer.features);
  }
  BlockMemory(Workspace& workspace, const EncoderLayer& layer, const EncoderPlan& plan)
      : gemm(workspace, plan.block_tokens, plan.input_words),
        intermediate(workspace.take<float>(plan.block_tokens * layer.up.n)),
        sum(workspace.take<float>(plan.block_tokens * layer.features)),
        normed(workspace.take<float>(plan.block_tokens * layer.features)) {}
};

// query, key and value of a block of tokens.
inline void project(const Team& team, const EncoderLayer& layer, TokenBlock tokens, const BlockMemory& memory, float* scratch) {
  Gemm qkv = layer.qkv;
  qkv.m = tokens.count;
  qkv.input = rows_from(layer.input, tokens.begin);
  for (Matrix* output = qkv.outputs; output != qkv.outputs + 3; ++output) *output = rows_from(*output, tokens.begin);
  if (!layer.norm_before) return run_gemm(team, qkv, memory.gemm);
  Norm norm = layer.attention_norm;
  norm.input = qkv.input;
  norm.output = qkv.input = {memory.normed, layer.features};
  run_gemm(team, qkv, memory.gemm, [&](int64_t row, int rows) { dispatch().norm.layer_norm(norm, row, row + rows, scratch); });
}

// The rest of the layer, from the attended values of a block of tokens to its result.
inline void transform(const Team& team, const EncoderLayer& layer, TokenBlock tokens, const BlockMemory& memory, float* scratch) {
  const NormKernels& norms = dispatch().norm;
  const Matrix context = {layer.context, layer.attention_features}, sum = {memory.sum, layer.features}, normed = {memory.normed, layer.features};
  const Matrix intermediate = {memory.intermediate, layer.up.n}, result = rows_from(layer.result, tokens.begin);

  Gemm output = layer.output;
  output.m = tokens.count;
  output.input = rows_from(context, tokens.begin);
  output.residual = rows_from(layer.input, tokens.begin);
  output.write_to(sum);
  run_gemm(team, output, memory.gemm);

  Norm between = layer.norm_before ? layer.ffn_norm : layer.attention_norm;
  between.input = sum, between.output = normed;
  Gemm up = layer.up;
  up.m = tokens.count;
  up.input = normed;
  up.write_to(intermediate);
  run_gemm(team, up, memory.gemm, [&](int64_t row, int rows) { norms.layer_norm(between, row, row + rows, scratch); });

  Gemm down = layer.down;
  down.m = tokens.count;
  down.input = intermediate;
  down.residual = layer.norm_before ? sum : normed;
  down.write_to(layer.norm_before ? result : sum);
  run_gemm(team, down, memory.gemm);
  if (layer.norm_before) return;

  Norm last = layer.ffn_norm;
  last.input = sum, last.output = result;
  team.each(tokens.count, 1, [&](int64_t begin, int64_t end) { norms.layer_norm(last, begin, end, scratch); });
}

// memories: plan.memories() of them; scratch: scratch_floats for each thread.
inline void run_layer(Team& team, const EncoderLayer& shared, const EncoderPlan& shared_plan, const AttentionPlan& attention,
                      const BlockMemory* memories, float* scratch) {
  const EncoderLayer layer = shared;  // see run_gemm
  const EncoderPlan plan = shared_plan;
  float* mine = scratch + team.slot() * plan.scratch_floats;
  if (!plan.by_blocks()) {
    const BlockMemory memory = memories[0];
    project(team, layer, {0, layer.tokens}, memory, mine);
    run_attention(team, attention, scratch, plan.scratch_floats);
    return transform(team, layer, {0, layer.tokens}, memory, mine);
  }
  const BlockMemory memory = memories[team.slot()];
  const Team alone = team.alone();
  team.claim(plan.blocks, [&](int64_t i) { project(alone, layer, plan.block(i, layer.tokens), memory, mine); });
  run_attention(team, attention, scratch, plan.scratch_floats);
  team.claim(plan.blocks, [&](int64_t i) { transform(alone, layer, plan.block(i, layer.tokens), memory, mine); });
}

}  // namespace hfca
