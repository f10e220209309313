// decoder_layers: schema, checks, cutting out the padding, call.
#include <cstring>

#include "../attention/arguments.h"
#include "../decoder/arguments.h"
#include "../decoder/following.h"
#include "../decoder/recurrence_arguments.h"
#include "../decoder/sequences.h"

namespace hfca {
namespace {

constexpr const char* op = decoder_op;

// Sizes of the widest layer.
struct Widths {
  int64_t merged = 0, query = 0, context = 0, intermediate = 0, head_group = 0, normed = 0, rest = 0;
  int64_t words = 0, buffer = 0, partials = 0;
  int64_t logits = 0, mixture_bytes = 0, expert_words = 0;
};

Tensor decoder_layers(const Tensor& hidden_states, const std::vector<Tensor>& weights, const Tensor& vectors, const Tensor& layout,
                      const Tensor& scalars, const std::vector<Tensor>& keys, const std::vector<Tensor>& values,
                      const std::vector<int64_t>& past, const std::vector<Tensor>& rotary, const OptionalTensor& start,
                      const OptionalTensor& rows, const OptionalTensor& mask, const std::vector<Tensor>& cross_keys,
                      const std::vector<Tensor>& cross_values, const OptionalTensor& cross_padding, const OptionalTensor& cross_rows,
                      const std::vector<Tensor>& per_layer_inputs) {
  check_floating(hidden_states, op, "hidden_states");
  STD_TORCH_CHECK(hidden_states.dim() == 3, "hf_cpu_accel::decoder_layers: hidden_states must be [batch, q_len, features]");
  const int64_t features = hidden_states.size(2), count = layout.dim() == 2 ? layout.size(0) : 0;
  constexpr int64_t integers = sizeof(LayerLayout) / sizeof(int64_t), reals = sizeof(LayerScalars) / sizeof(double);
  STD_TORCH_CHECK(count > 0 && layout.scalar_type() == ScalarType::Long && layout.size(1) == integers && layout.is_contiguous() &&
                      scalars.scalar_type() == ScalarType::Double && scalars.dim() == 2 && scalars.size(0) == count &&
                      scalars.size(1) == reals && scalars.is_contiguous() && vectors.scalar_type() == ScalarType::Float &&
                      vectors.is_contiguous(),
                  "hf_cpu_accel::decoder_layers: layout, scalars and vectors must be those of bind()");
  const size_t layers = static_cast<size_t>(count);
  STD_TORCH_CHECK(keys.size() == layers && values.size() == layers && past.size() == layers,
                  "hf_cpu_accel::decoder_layers: keys, values and past must have one entry per layer");

  DecoderStep step;
  step.batch = hidden_states.size(0), step.q_len = hidden_states.size(1), step.longest = *std::max_element(past.begin(), past.end());
  STD_TORCH_CHECK(*std::min_element(past.begin(), past.end()) >= 0 && step.longest <= INT32_MAX &&
                      step.batch * (step.longest + step.q_len) <= INT32_MAX,
                  "hf_cpu_accel::decoder_layers: past must not be negative, and there may be at most 2^31 - 1 tokens");
  if (start) step.start = indices_of(*start, "start", step.batch, -1);
  if (rows) step.rows = indices_of(*rows, "rows", step.batch, step.longest), step.rows_stride = rows->stride(0);

  // The tokens that are computed, and where they lie in [batch * q_len].
  DecoderCall call;
  call.features = features;
  std::vector<int32_t> index;
  for (int64_t b = 0; b < step.batch; ++b) {
    const int64_t padded = step.start ? std::min(std::max<int64_t>(step.start[b] - step.longest, 0), step.q_len) : 0;
    call.sequences.push_back({call.tokens, step.q_len - padded, padded});
    call.tokens += step.q_len - padded;
  }
  Tensor result = empty_of(hidden_states, sizes_of(hidden_states));
  call.result = {result.mutable_data_ptr(), features, is_bf16(result)};
  if (call.tokens < step.batch * step.q_len) {
    const int64_t bytes = features * static_cast<int64_t>(hidden_states.element_size());
    for (const DecoderSequence& s : call.sequences) {
      char* first = static_cast<char*>(call.result.data) + (&s - call.sequences.data()) * step.q_len * bytes;
      std::memset(first, 0, static_cast<size_t>(s.begin * bytes));
      for (int64_t i = 0; i < s.count; ++i) index.push_back(static_cast<int32_t>((&s - call.sequences.data()) * step.q_len + s.begin + i));
    }
  }
  Tensor keep_input = hidden_states, keep_mask = hidden_states;
  call.input = as_rows(hidden_states, keep_input);
  if (!index.empty()) call.input.index = call.result.index = index.data();
  const int64_t tokens = call.tokens;

  const LayerArguments arguments{weights, static_cast<const float*>(vectors.const_data_ptr()), vectors.dim() == 1 ? vectors.size(0) : 0};
  const auto* layouts = static_cast<const LayerLayout*>(layout.const_data_ptr());
  const auto* reals_of = static_cast<const LayerScalars*>(scalars.const_data_ptr());
  Widths widths;
  double work = 0;
  bool own = true;
  call.layers.reserve(layers);
  for (size_t i = 0; i < layers; ++i) {
    const LayerLayout& l = layouts[i];
    call.layers.push_back(layer_of(arguments, l, reals_of[i], tokens, features));
    DecoderLayer& layer = call.layers.back();
    layer.past = past[i];
    if (l.recurrence.kind != 0) {
      STD_TORCH_CHECK(!step.rows && tokens == step.batch * step.q_len,
                      "hf_cpu_accel::decoder_layers: layers with a recurrence take no rows and no padding");
      layer.recurrence = recurrence_of(arguments, l, reals_of[i], step.batch, step.q_len, features, keys[i], values[i]);
      widths.query = std::max(widths.query, l.recurrence.channels),
      widths.rest = std::max({widths.rest, layer.recurrence.rest.n, layer.recurrence.selected.n});
      widths.buffer = std::max(widths.buffer, layer.recurrence.buffer());
      work += layer.recurrence.work();
    } else {
      layer.key = cache_of(keys[i], "keys", step.batch, l.kv_heads, past[i] + step.q_len, l.head_dim);
      layer.value = cache_of(values[i], "values", step.batch, l.kv_heads, past[i] + step.q_len, l.value_dim);
    }
    if (l.per_layer_features > 0) layer.per_layer_input = per_layer_input_of(l, per_layer_inputs, step.batch, step.q_len);
    layer.tables = tables_of(call.tables, l, rotary, step.batch, step.q_len);
    layer.few = step.q_len <= dispatch().kernels.attention.few_queries;
    STD_TORCH_CHECK(!layer.crosses || (cross_keys.size() == layers && cross_values.size() == layers),
                    "hf_cpu_accel::decoder_layers: cross_keys and cross_values must have one entry per layer");
    for (const Gemm* g :
         {&layer.qkv, &layer.output, &layer.cross_query, &layer.cross_output, &layer.up, &layer.down, &layer.per_layer_gate,
          &layer.per_layer_output, &layer.router.logits, &layer.recurrence.rest, &layer.recurrence.selected, &layer.recurrence.steps}) {
      if (g->n == 0) continue;
      widths.words = std::max(widths.words, most_input_words(*g));
      work += multiply_adds(*g);
      own &= tokens <= kernels_of(*g).tile_rows;
    }
    if (layer.mixture.experts > 0) {
      widths.logits = std::max(widths.logits, layer.router.logits.n);
      widths.mixture_bytes = std::max(widths.mixture_bytes, MixtureMemory(layer.mixture, tokens, nullptr).bytes);
      widths.expert_words = std::max(widths.expert_words, input_words(layer.mixture));
      work += multiply_adds(layer.mixture, tokens);
    }
    widths.merged = std::max({widths.merged, l.qkv_features, l.cross_heads * l.cross_head_dim});
    widths.query = std::max(widths.query, layer.few ? 0 : l.heads * l.head_dim);
    widths.context = std::max({widths.context, l.heads * l.value_dim, l.cross_heads * l.cross_value_dim});
    widths.intermediate = std::max({widths.intermediate, layer.up.n > 0 ? l.intermediate_features : 0, layer.per_layer_gate.n});
    widths.normed = std::max({widths.normed, features, layer.heads.finishes() || layer.recurrence.finishes() ? layer.output.k : 0,
                              layer.ffn_sub_norm.exists() ? l.intermediate_features : 0, layer.per_layer_gate.n});
    widths.head_group = std::max(widths.head_group, layer.few ? l.heads / l.kv_heads * step.q_len * l.head_dim : 0);
  }
  if (mask)
    read_mask(step.mask, *mask, {step.batch, mask->dim() == 4 ? mask->size(1) : 1, step.q_len, step.longest + step.q_len}, op, keep_mask);

  // Memory that all threads work on.
  const auto floats = [&](int64_t columns) { return Workspace::size_of<float>(tokens * columns); };
  int64_t table_floats = 0;
  for (const RotaryTables& t : call.tables) table_floats += 2 * t.half;
  Workspace shared(floats(widths.merged) + floats(widths.query) + floats(widths.context) + floats(widths.intermediate) +
                   3 * floats(features) + floats(table_floats) + floats(widths.logits) + floats(widths.rest) +
                   Workspace::size_of<char>(widths.mixture_bytes));
  const auto take = [&](Workspace& from, int64_t columns) { return Matrix{from.take<float>(tokens * columns), columns}; };
  call.merged = shared.take<float>(tokens * widths.merged), call.query = shared.take<float>(tokens * widths.query);
  call.context = shared.take<float>(tokens * widths.context), call.intermediate = shared.take<float>(tokens * widths.intermediate);
  call.branch = take(shared, features);
  call.sums[0] = take(shared, features), call.sums[1] = take(shared, features);
  call.logits = shared.take<float>(tokens * widths.logits), call.rest = shared.take<float>(tokens * widths.rest),
  call.mixture = shared.take<char>(widths.mixture_bytes);
  float* table = shared.take<float>(tokens * table_floats);
  for (RotaryTables& t : call.tables) {
    t.own_cos = table, t.own_sin = table + tokens * t.half;
    table += 2 * tokens * t.half;
  }

  const int64_t threads = team_size(work);
  const CrossCache crossing{cross_keys, cross_values, cross_padding,
                            cross_rows ? indices_of(*cross_rows, "cross_rows", step.batch, -1) : nullptr};
  std::vector<std::vector<AttentionSequence>> sequences(layers), crossings(layers);
  for (size_t i = 0; i < layers; ++i) {
    const LayerLayout& l = layouts[i];
    DecoderLayer& layer = call.layers[i];
    if (layer.recurrence.exists()) {
      connect(layer.recurrence, l, call);
    } else {
      STD_TORCH_CHECK(!mask || mask->size(1) == 1 || mask->size(1) == l.heads, "hf_cpu_accel::decoder_layers: mask must have 1 or ",
                      l.heads, " heads");
      sequences[i] = sequences_of(call, layer, l, reals_of[i], step, arguments);
      layer.attention = plan_attention(sequences[i].data(), step.batch, l.kv_heads, threads, layer.few);
      widths.buffer = std::max(widths.buffer, layer.attention.scratch_floats);
      widths.partials = std::max(widths.partials, layer.attention.partial_floats);
    }
    if (layer.crosses) {
      crossings[i] = cross_sequences_of(call, i, l, reals_of[i], step.batch, crossing);
      layer.cross = plan_attention(crossings[i].data(), static_cast<int64_t>(crossings[i].size()), l.cross_kv_heads, threads, true);
      widths.buffer = std::max(widths.buffer, layer.cross.scratch_floats);
      widths.partials = std::max(widths.partials, layer.cross.partial_floats);
      layer.cross_query.write_to({call.merged, l.cross_heads * l.cross_head_dim});
    }
    layer.qkv.write_to({call.merged, l.qkv_features});
    layer.router.logits.write_to({call.logits, layer.router.logits.n});
    layer.up.write_to({call.intermediate, l.intermediate_features});
    layer.per_layer_gate.write_to({call.intermediate, layer.per_layer_gate.n});
    if (layer.up.gated)
      layer.up.outputs[1] = layer.up.outputs[0], layer.up.output_begin[1] = l.intermediate_features, layer.up.output_begin[2] = layer.up.n;
  }
  if (own) follow(call);
  if (step.rows) check_rows(step, keys, values);
  if (call.tokens == 0 || features == 0) return result;
  widths.buffer = std::max(widths.buffer, norm_buffer_rows * widths.normed);

  // Memory of each thread, or of all together.
  const int64_t memories = own ? threads : 1, expert_rows = widths.expert_words > 0 ? std::min(tokens, most_block_rows) : 0;
  Workspace workspace(
      static_cast<size_t>(memories) * (GemmMemory::size_of(tokens, widths.words) + floats(widths.normed) + 2 * floats(features)) +
      static_cast<size_t>(threads) * (Workspace::size_of<float>(widths.head_group) + Workspace::size_of<float>(widths.buffer) +
                                      GemmMemory::size_of(expert_rows, widths.expert_words)) +
      Workspace::size_of<float>(widths.partials));
  std::vector<DecoderMemory> memory;
  for (int64_t i = 0; i < threads; ++i) {
    if (i < memories) {
      GemmMemory gemm(workspace, tokens, widths.words);
      gemm.own = own;
      const Matrix normed{take(workspace, widths.normed).data, features}, first = take(workspace, features),
                                                                          second = take(workspace, features);
      memory.push_back({gemm, gemm, normed, {first, second}, nullptr, nullptr});
    } else {
      memory.push_back(memory[0]);
    }
    memory.back().experts = GemmMemory(workspace, expert_rows, widths.expert_words);
    memory.back().query = workspace.take<float>(widths.head_group), memory.back().buffer = workspace.take<float>(widths.buffer);
  }
  call.partials = workspace.take<float>(widths.partials);
  run_team(threads, [&](Team& team) {
    const DecoderMemory mine = memory[static_cast<size_t>(team.slot())];
    run_decoder(team, call, mine);
  });
  return result;
}

}  // namespace
}  // namespace hfca

HFCA_OP(decoder_layers,
        "(Tensor hidden_states, Tensor[] weights, Tensor vectors, Tensor layout, Tensor scalars, Tensor(a!)[] keys, Tensor(b!)[] values, "
        "int[] past, Tensor[] rotary, Tensor? start, Tensor? rows, Tensor? mask, Tensor[] cross_keys, Tensor[] cross_values, "
        "Tensor? cross_padding, Tensor? cross_rows, Tensor[] per_layer_inputs) -> Tensor")
