// A run of transformer decoder layers in one fork: the threads work on each step together and meet after it.
//
//   attention  close -> norm -> qkv | norms of heads, rotation, cache, attention | sub-norm, gate -> output, residual
//   recurrence close -> norm -> inputs | convolution | state | gate, norm -> output, residual     instead of attention: see recurrence.h
//   cross      close -> norm -> query | attention over the encoder's output | output, residual
//   FFN        close -> norm -> up, activation, gate | sub-norm -> down, residual
//   experts    close -> norm -> router | choice, order | up | down | combine, residual     instead of the FFN: see experts.h
//   per layer  close -> gate, activation | times the layer's own input -> output, residual
//
// Bars are meetings; with many tokens the threads also meet before each product, when its input is packed. A branch whose output takes
// more than the addition of a residual (a norm, a factor) leaves that open, and the next step closes it as it reads the rows.
//
// Decoding is bound by the weights' way from memory: with so few tokens that one thread would pack them while the others wait, each
// thread packs all rows for itself, norms included, and each task of attention makes the heads that it needs.
//
// The residual stream is float32 for every input type.
#pragma once
#include <vector>

#include "../attention/driver.h"
#include "../experts/experts.h"
#include "../gemm/driver.h"
#include "../norm/optional_norm.h"
#include "heads.h"
#include "recurrence.h"

namespace hfca {

// How a branch's output becomes part of the stream x: out(factor * (x + scale * post(branch))).
struct BranchEnd {
  OptionalNorm post, out;
  float scale = 1.0f, factor = 1.0f;

  bool adds() const { return !post.exists() && scale == 1.0f && factor == 1.0f; }  // the branch's last product can do it
};

// Of the rotary tables that one or more layers use: [tokens][half] float32.
struct RotaryTables {
  const void *cos = nullptr, *sin = nullptr;  // the caller's [1 or batch, q_len, columns], dense columns
  bool bf16 = false;
  int64_t cos_strides[2] = {}, sin_strides[2] = {};  // batch, position
  int64_t step = 1, half = 0;                        // frequency i is column i * step
  float *own_cos = nullptr, *own_sin = nullptr;
};

// What a layer is given of its own for each token: [batch, q_len, features], dense features.
struct PerLayerInput {
  const void* data = nullptr;
  bool bf16 = false;
  int64_t batch_stride = 0, position_stride = 0;
};

struct DecoderSequence {
  int64_t first, count, begin;  // its first row here, how many, and where in the call's q_len they begin
};

struct DecoderLayer {
  Gemm qkv, output, cross_query, cross_output, up, down, per_layer_gate, per_layer_output;  // the weight sides
  OptionalNorm attention_norm, cross_norm, ffn_norm, ffn_sub_norm;
  BranchEnd attention_end, cross_end, ffn_end, per_layer_end;
  PerLayerInput per_layer_input;
  bool parallel = false;
  Router router;
  Mixture mixture;  // of 0 experts where the layer has an FFN
  TokenHeads heads;
  int64_t tables = -1, past = 0;
  Heads key, value;  // the cache
  AttentionPlan attention, cross;
  Recurrence recurrence;
  bool crosses = false;
  bool shares_keys = false;  // it attends to what an earlier layer has stored, and stores nothing
  bool few = false;  // so few queries that tasks of attention make their own heads

  bool feeds() const { return up.n > 0 || mixture.experts > 0; }  // whether an FFN or experts follow attention
};

// What a thread works with. With many tokens all but `query` and `buffer` are the same for all threads.
struct DecoderMemory {
  GemmMemory gemm, experts;  // experts: of this thread
  Matrix normed, streams[2];
  float *query, *buffer;
};

struct DecoderCall {
  std::vector<DecoderLayer> layers;
  std::vector<RotaryTables> tables;
  std::vector<DecoderSequence> sequences;
  int64_t tokens = 0, features = 0;
  Matrix input, result;  // a row per token, padding left out by their index
  Matrix branch, sums[2];
  float *merged, *query, *context, *intermediate;  // [tokens, features of the layer that is computed]; merged: the output of qkv
  float* rest = nullptr;  // [tokens, features]: the output of a recurrence's second product
  float* partials = nullptr;
  float* logits = nullptr;  // [tokens, of the router]
  char* mixture = nullptr;    // memory for a MixtureMemory of any layer
};

// f(sequence, row, position in the call's q_len) for rows [begin, end).
template <class F>
inline void each_token(const DecoderCall& call, int64_t begin, int64_t end, const F& f) {
  for (size_t b = 0; b < call.sequences.size(); ++b) {
    const DecoderSequence s = call.sequences[b];
    const int64_t last = std::min(end, s.first + s.count);
    for (int64_t row = std::max(begin, s.first); row < last; ++row) f(static_cast<int64_t>(b), row, s.begin + row - s.first);
  }
}

inline float element(const void* data, bool bf16, int64_t at) {
  return bf16 ? widened(static_cast<const uint16_t*>(data)[at]) : static_cast<const float*>(data)[at];
}

inline void read_tables(const DecoderCall& call, int64_t begin, int64_t end) {
  for (const RotaryTables& t : call.tables)
    each_token(call, begin, end, [&](int64_t b, int64_t row, int64_t position) {
      const int64_t cos = b * t.cos_strides[0] + position * t.cos_strides[1], sin = b * t.sin_strides[0] + position * t.sin_strides[1];
      for (int64_t i = 0; i < t.half; ++i) {
        t.own_cos[row * t.half + i] = element(t.cos, t.bf16, cos + i * t.step);
        t.own_sin[row * t.half + i] = element(t.sin, t.bf16, sin + i * t.step);
      }
    });
}

// kv heads [begin, end) of one token, and their query heads: the query to `query`, key and value to the cache if `store`.
inline void write_token(const DecoderCall& call, const DecoderLayer& layer, int64_t sequence, int64_t row, int64_t position, int64_t begin,
                        int64_t end, float* query, bool store) {
  HeadTargets to;
  to.query = query;
  if (store && !layer.shares_keys) {
    to.key = layer.key, to.value = layer.value;
    for (Heads* cache : {&to.key, &to.value})
      cache->data = cache->at(sequence * cache->batch_stride + (layer.past + position) * cache->position_stride);
  }
  const float *cos = nullptr, *sin = nullptr;
  if (layer.tables >= 0) {
    const RotaryTables& t = call.tables[static_cast<size_t>(layer.tables)];
    cos = t.own_cos + row * t.half, sin = t.own_sin + row * t.half;
  }
  dispatch().kernels.heads.write(layer.heads, call.merged + row * layer.qkv.n, cos, sin, begin, end, to);
}

inline void attend(Team& team, const DecoderCall& call, const DecoderLayer& layer, const DecoderMemory& mine) {
  const int64_t kv_heads = layer.heads.kv_heads, group = layer.heads.heads / kv_heads, width = group * layer.heads.head_dim;
  if (!layer.few) {
    team.each(call.tokens, [&](int64_t begin, int64_t end) {
      each_token(call, begin, end, [&](int64_t b, int64_t row, int64_t position) {
        write_token(call, layer, b, row, position, 0, kv_heads, call.query + row * kv_heads * width, true);
      });
    });
    return run_attention(team, layer.attention, mine.buffer, call.partials);
  }
  run_attention(team, layer.attention, mine.buffer, call.partials, [&](Attention& a, const AttentionTask& task) {
    const DecoderSequence s = call.sequences[static_cast<size_t>(task.batch)];
    const bool store = task.kv_end == a.kv_len;  // the part with the new keys
    for (int64_t i = 0; i < s.count; ++i)
      write_token(call, layer, task.batch, s.first + i, s.begin + i, task.kv_head, task.kv_head + 1, mine.query + i * width, store);
    // The kernel counts from head 0 of sequence `batch`.
    a.query = {mine.query - task.kv_head * width, 0, layer.heads.head_dim, width};
  });
}

// Rows [begin, end) of what `end` left open, to `to`. x + branch is in x already if end.adds().
inline void close_branch(const BranchEnd& ending, const Matrix& x, const Matrix& branch, const Matrix& to, const DecoderMemory& mine,
                         int64_t columns, int64_t begin, int64_t end) {
  Matrix sum = x;
  if (!ending.adds()) {
    if (ending.post.exists()) ending.post.run(branch, mine.normed, begin, end, mine.buffer);
    sum = ending.out.exists() ? mine.normed : to;
    dispatch().kernels.heads.add_scaled(x, ending.post.exists() ? mine.normed : branch, ending.scale, ending.factor, sum, columns, begin,
                                        end);
  }
  if (ending.out.exists()) ending.out.run(sum, to, begin, end, mine.buffer);
}

// Rows [begin, end) of `gated` times the layer's own input, to `out`; both are dense rows of as many features as that has.
inline void take_per_layer_input(const DecoderCall& call, const DecoderLayer& layer, const float* gated, int64_t begin, int64_t end,
                                 float* out) {
  const PerLayerInput& input = layer.per_layer_input;
  const int64_t features = layer.per_layer_gate.n;
  each_token(call, begin, end, [&](int64_t b, int64_t row, int64_t position) {
    const int64_t first = b * input.batch_stride + position * input.position_stride;
    for (int64_t i = 0; i < features; ++i) out[row * features + i] = gated[row * features + i] * element(input.data, input.bf16, first + i);
  });
}

inline void run_decoder(Team& team, const DecoderCall& call, const DecoderMemory& mine) {
  Matrix x = call.input;             // the residual stream
  const BranchEnd* open = nullptr;   // how call.branch (or what was added to x) is still to become part of it
  int stream = 0, sum = 0;

  // g of norm(x), or of norm(*other), which is returned.
  const auto enter = [&](const Gemm& side, const OptionalNorm& norm, const Matrix* other) {
    const BranchEnd* const closing = open;
    const Matrix before = x;
    if (closing) x = mine.streams[stream ^= 1];
    open = nullptr;
    Gemm g = side;
    const Matrix input = other ? *other : x;
    g.input = norm.exists() ? mine.normed : input;
    run_gemm(team, g, mine.gemm, [&](int64_t row, int rows) {
      if (closing) close_branch(*closing, before, call.branch, x, mine, call.features, row, row + rows);
      if (norm.exists()) norm.run(input, mine.normed, row, row + rows, mine.buffer);
    });
    return g.input;
  };
  // Where a branch's last step puts it, and what it adds to it; result: where the stream ends, or null.
  const auto destination = [&](const BranchEnd& end, const Matrix* result, Matrix& residual) {
    if (!end.adds() || end.out.exists()) open = &end;
    if (!end.adds()) return call.branch;
    residual = x;
    return x = result && !end.out.exists() ? *result : call.sums[sum ^= 1];
  };
  // The last product of a branch, of `input` or, if `finishes`, of what finish(first row, end of rows, to) makes of it.
  const auto leave = [&](const Gemm& side, float* input, const BranchEnd& end, const Matrix* result, bool finishes, const auto& finish) {
    Gemm g = side;
    float* const finished = static_cast<float*>(mine.normed.data);
    g.input = {finishes ? finished : input, g.k};
    g.write_to(destination(end, result, g.residual));
    run_gemm(team, g, mine.gemm, [&](int64_t row, int rows) {
      if (finishes) finish(row, row + rows, finished);
    });
  };
  const auto nothing = [](int64_t, int64_t, float*) {};
  const auto mix = [&](const DecoderLayer& layer, const Matrix* other, const Matrix* result) {
    const Router& router = layer.router;
    const Matrix input = enter(router.logits, layer.ffn_norm, other);
    const MixtureMemory memory(layer.mixture, call.tokens, call.mixture);
    const Assignment& a = memory.assignment;
    const int64_t logits = router.logits.n;
    const auto choose = [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t)
        choose_experts(router, call.logits + t * logits, a.experts, a.top_k, a.expert + t * a.top_k, a.weight + t * a.top_k);
    };
    if (!mine.gemm.own) team.each(call.tokens, choose);
    team.each(1, [&](int64_t, int64_t) {
      if (mine.gemm.own) choose(0, call.tokens);
      sort_by_expert(a, input.index);
    });
    Matrix residual;
    const Matrix to = destination(layer.ffn_end, result, residual);
    run_mixture(team, layer.mixture, memory, input, residual, to, router.gates_shared ? call.logits + a.experts : nullptr, logits,
                mine.experts);
  };

  if (!call.tables.empty()) team.each(call.tokens, [&](int64_t begin, int64_t end) { read_tables(call, begin, end); });
  for (const DecoderLayer& layer : call.layers) {
    const Matrix* const result = &layer == &call.layers.back() ? &call.result : nullptr;
    const Matrix* const result_before = layer.feeds() ? nullptr : result;
    const Matrix normed = enter(layer.qkv, layer.attention_norm, nullptr);
    const Matrix input = x;
    if (layer.recurrence.exists()) {
      recur(team, layer.recurrence, normed, mine.gemm, mine.buffer);
    } else {
      attend(team, call, layer, mine);
    }
    const bool recurs = layer.recurrence.exists();
    leave(layer.output, call.context, layer.attention_end, layer.crosses ? nullptr : result_before,
          layer.recurrence.finishes() || layer.heads.finishes(), [&](int64_t begin, int64_t end, float* out) {
            if (recurs) return finish(layer.recurrence, begin, end, out, mine.buffer);
            for (int64_t row = begin; row < end; ++row)
              dispatch().kernels.heads.finish(layer.heads, call.merged + row * layer.qkv.n, call.context + row * layer.output.k,
                                              out + row * layer.output.k);
          });
    if (layer.crosses) {
      enter(layer.cross_query, layer.cross_norm, nullptr);
      run_attention(team, layer.cross, mine.buffer, call.partials);
      leave(layer.cross_output, call.context, layer.cross_end, result_before, false, nothing);
    }
    if (!layer.feeds()) continue;
    const bool goes_on = layer.per_layer_gate.n > 0;
    const Matrix* const result_of_ffn = goes_on ? nullptr : result;
    const Matrix* const other = layer.parallel ? &input : nullptr;
    if (layer.mixture.experts > 0) {
      mix(layer, other, result_of_ffn);
    } else {
      enter(layer.up, layer.ffn_norm, other);
      leave(layer.down, call.intermediate, layer.ffn_end, result_of_ffn, layer.ffn_sub_norm.exists(),
            [&](int64_t begin, int64_t end, float* out) {
              layer.ffn_sub_norm.run({call.intermediate, layer.down.k}, {out, layer.down.k}, begin, end, mine.buffer);
            });
    }
    if (!goes_on) continue;
    enter(layer.per_layer_gate, OptionalNorm(), nullptr);
    leave(layer.per_layer_output, call.intermediate, layer.per_layer_end, result, true,
          [&](int64_t begin, int64_t end, float* out) { take_per_layer_input(call, layer, call.intermediate, begin, end, out); });
  }
  if (!open) return;
  const BranchEnd& last = *open;
  team.each(call.tokens,
            [&](int64_t begin, int64_t end) { close_branch(last, x, call.branch, call.result, mine, call.features, begin, end); });
}

}  // namespace hfca
