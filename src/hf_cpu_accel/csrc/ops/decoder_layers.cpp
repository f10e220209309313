// decoder_layers: schema, checks, cutting out the padding, call.
#include <cstring>

#include "../attention/arguments.h"
#include "../decoder/arguments.h"

namespace hfca {
namespace {

constexpr const char* op = decoder_op;

// What all layers see alike.
struct Step {
  int64_t batch = 0, q_len = 0, longest = 0;
  const int32_t *start = nullptr, *rows = nullptr;
  int64_t rows_stride = 0;
  Attention mask;  // only its mask
};

// That the rows of the positions that are looked at are there in all caches.
void check_rows(const Step& step, const std::vector<Tensor>& keys, const std::vector<Tensor>& values) {
  int64_t there = INT32_MAX;
  for (const std::vector<Tensor>* side : {&keys, &values})
    for (const Tensor& t : *side) there = std::min(there, t.size(0));
  int32_t least = 0, most = 0;
  for (int64_t b = 0; b < step.batch; ++b)
    for (int64_t position = step.start ? std::max<int32_t>(step.start[b], 0) : 0; position < step.longest; ++position) {
      const int32_t row = step.rows[b * step.rows_stride + position];
      least = std::min(least, row), most = std::max(most, row);
    }
  STD_TORCH_CHECK(least >= 0 && most < there, "hf_cpu_accel::decoder_layers: rows must name rows from 0 to ", there - 1,
                  " of keys and values, and names ", least < 0 ? least : most);
}

// The attention of each sequence of a layer over its cache.
std::vector<AttentionSequence> sequences_of(const DecoderCall& call, const DecoderLayer& layer, const LayerLayout& l, const LayerScalars& s,
                                            const Step& step, const LayerArguments& arguments) {
  Attention shared = step.mask;
  shared.group = l.heads / l.kv_heads, shared.head_dim = l.head_dim, shared.value_dim = l.value_dim;
  shared.causal = true, shared.window = l.window, shared.scale = static_cast<float>(s.scale),
  shared.softcap = static_cast<float>(s.softcap);
  shared.alibi = arguments.vector(l.alibi, l.heads), shared.sinks = arguments.vector(l.sinks, l.heads);
  shared.relative = arguments.vector(l.relative, l.heads * l.relative_count), shared.relative_count = l.relative_count;
  shared.key = layer.key, shared.value = layer.value;
  shared.kv_len = layer.past + step.q_len;
  const int64_t mask_bytes = shared.mask_kind == MaskKind::boolean    ? 1
                             : shared.mask_kind == MaskKind::bfloat16 ? 2
                                                                      : 4,
                forgotten = step.longest - layer.past;
  std::vector<AttentionSequence> sequences;
  sequences.reserve(call.sequences.size());
  for (size_t b = 0; b < call.sequences.size(); ++b) {
    const DecoderSequence& tokens = call.sequences[b];
    const int64_t row = static_cast<int64_t>(b);
    Attention a = shared;
    a.q_len = tokens.count;
    a.query = {call.query + tokens.first * l.heads * l.head_dim, 0, l.head_dim, l.heads * l.head_dim};
    a.output = {call.context + tokens.first * l.heads * l.value_dim, 0, l.value_dim, l.heads * l.value_dim};
    if (a.mask_kind != MaskKind::none) {
      a.mask = static_cast<const char*>(a.mask) + (row * a.mask_batch_stride + tokens.begin * a.mask_query_stride + forgotten) * mask_bytes;
      a.mask_batch_stride = 0;
    }
    if (step.rows) a.rows = step.rows + row * step.rows_stride + forgotten, a.row_keys = a.kv_len - a.q_len;
    const int64_t first = step.start ? step.start[b] - forgotten : 0;
    sequences.push_back({a, row, std::min(std::max<int64_t>(first, 0), a.kv_len), a.kv_len});
  }
  return sequences;
}

// The encoder's keys or values [texts, kv_heads, length, features]: kernels only read them.
struct CrossCache {
  const std::vector<Tensor>&keys, &values;
  const std::optional<Tensor>& padding;
  const int32_t* rows;  // [batch], the text of each sequence; null: its own

  Heads heads(const Tensor& t, const char* name, int64_t texts, int64_t kv_heads, int64_t length, int64_t features) const {
    const HeadType type = head_type(t, op, name);
    const int64_t width = width_of(type, features);
    STD_TORCH_CHECK(t.dim() == 4 && t.size(0) == texts && t.size(1) == kv_heads && t.size(2) == length && t.size(3) == width &&
                        (width == 1 || t.stride(3) == 1),
                    "hf_cpu_accel::decoder_layers: ", name, " must be [", texts, ", ", kv_heads, ", ", length, ", ", width,
                    "], with a dense last dimension");
    return {const_cast<void*>(t.const_data_ptr()), t.stride(0), t.stride(1), t.stride(2), type};
  }

  int64_t text_of(int64_t sequence) const { return rows ? rows[sequence] : sequence; }
  const bool* padding_of(int64_t sequence) const {
    return static_cast<const bool*>(padding->const_data_ptr()) + sequence * padding->stride(0);
  }

  // Whether two sequences look at the very same keys.
  bool alike(int64_t one, int64_t other, int64_t length) const {
    return text_of(one) == text_of(other) && (!padding || std::equal(padding_of(one), padding_of(one) + length, padding_of(other)));
  }
};

// The attention of a layer over the encoder's output. Beams of one text follow one another and look at the same keys: they are so
// many queries of one sequence, which share the reading of them.
std::vector<AttentionSequence> crossing_of(const DecoderCall& call, size_t number, const LayerLayout& l, const LayerScalars& s,
                                           int64_t batch, const CrossCache& cache) {
  const int64_t length = cache.keys[number].dim() == 4 ? cache.keys[number].size(2) : 0;
  const int64_t texts = cache.rows && cache.keys[number].dim() == 4 ? cache.keys[number].size(0) : batch;
  Attention shared;
  shared.group = l.cross_heads / l.cross_kv_heads, shared.head_dim = l.cross_head_dim, shared.value_dim = l.cross_value_dim;
  shared.kv_len = length, shared.scale = static_cast<float>(s.cross_scale);
  shared.key = cache.heads(cache.keys[number], "cross_keys", texts, l.cross_kv_heads, length, l.cross_head_dim);
  shared.value = cache.heads(cache.values[number], "cross_values", texts, l.cross_kv_heads, length, l.cross_value_dim);
  if (cache.padding)
    STD_TORCH_CHECK(cache.padding->scalar_type() == ScalarType::Bool && cache.padding->dim() == 2 && cache.padding->size(0) == batch &&
                        cache.padding->size(1) == length && (length <= 1 || cache.padding->stride(1) == 1),
                    "hf_cpu_accel::decoder_layers: cross_padding must be boolean [", batch, ", ", length, "], dense");
  std::vector<AttentionSequence> sequences;
  sequences.reserve(call.sequences.size());
  for (int64_t b = 0, next = 0; b < batch; b = next) {
    STD_TORCH_CHECK(0 <= cache.text_of(b) && cache.text_of(b) < texts,
                    "hf_cpu_accel::decoder_layers: cross_rows names rows that cross_keys does not have");
    DecoderSequence tokens = call.sequences[static_cast<size_t>(b)];
    for (next = b + 1; next < batch && cache.alike(b, next, length); ++next)
      tokens.count += call.sequences[static_cast<size_t>(next)].count;
    Attention a = shared;
    TokenRange range{0, length};
    if (cache.padding) {
      const bool* row = cache.padding_of(b);
      range = token_range(row, length);
      if (has_holes(row, range)) a.mask_kind = MaskKind::boolean, a.mask = row;
    }
    const int64_t query = l.cross_heads * l.cross_head_dim, context = l.cross_heads * l.cross_value_dim;
    a.q_len = tokens.count;
    a.query = {call.merged + tokens.first * query, 0, l.cross_head_dim, query};
    a.output = {call.context + tokens.first * context, 0, l.cross_value_dim, context};
    sequences.push_back({a, cache.text_of(b), range.begin, range.end});
  }
  return sequences;
}

// Sizes of the widest layer.
struct Widths {
  int64_t merged = 0, query = 0, context = 0, intermediate = 0, head_group = 0;
  int64_t words = 0, buffer = 0, partials = 0;
  int64_t logits = 0, mixture_bytes = 0, expert_words = 0;
};

Tensor decoder_layers(const Tensor& hidden_states, const std::vector<Tensor>& weights, const Tensor& vectors, const Tensor& layout,
                      const Tensor& scalars, const std::vector<Tensor>& keys, const std::vector<Tensor>& values,
                      const std::vector<int64_t>& past, const std::vector<Tensor>& rotary, const std::optional<Tensor>& start,
                      const std::optional<Tensor>& rows, const std::optional<Tensor>& mask, const std::vector<Tensor>& cross_keys,
                      const std::vector<Tensor>& cross_values, const std::optional<Tensor>& cross_padding,
                      const std::optional<Tensor>& cross_rows) {
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

  Step step;
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
    layer.key = cache_of(keys[i], "keys", step.batch, l.kv_heads, past[i] + step.q_len, l.head_dim);
    layer.value = cache_of(values[i], "values", step.batch, l.kv_heads, past[i] + step.q_len, l.value_dim);
    layer.tables = tables_of(call.tables, l, rotary, step.batch, step.q_len);
    layer.few = l.heads / l.kv_heads * step.q_len <= dispatch().kernels.attention.few_rows;
    STD_TORCH_CHECK(!layer.crosses || (cross_keys.size() == layers && cross_values.size() == layers),
                    "hf_cpu_accel::decoder_layers: cross_keys and cross_values must have one entry per layer");
    for (const Gemm* g :
         {&layer.qkv, &layer.output, &layer.cross_query, &layer.cross_output, &layer.up, &layer.down, &layer.router.logits}) {
      if (g->n == 0) continue;
      widths.words = std::max(widths.words, input_words(*g));
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
    widths.intermediate = std::max(widths.intermediate, layer.up.n > 0 ? l.intermediate_features : 0);
    widths.head_group = std::max(widths.head_group, layer.few ? l.heads / l.kv_heads * step.q_len * l.head_dim : 0);
  }
  if (mask)
    read_mask(step.mask, *mask, {step.batch, mask->dim() == 4 ? mask->size(1) : 1, step.q_len, step.longest + step.q_len}, op, keep_mask);

  // Memory that all threads work on.
  const auto floats = [&](int64_t columns) { return Workspace::size_of<float>(tokens * columns); };
  int64_t table_floats = 0;
  for (const RotaryTables& t : call.tables) table_floats += 2 * t.half;
  Workspace shared(floats(widths.merged) + floats(widths.query) + floats(widths.context) + floats(widths.intermediate) +
                   3 * floats(features) + floats(table_floats) + floats(widths.logits) + Workspace::size_of<char>(widths.mixture_bytes));
  const auto take = [&](Workspace& from, int64_t columns) { return Matrix{from.take<float>(tokens * columns), columns}; };
  call.merged = shared.take<float>(tokens * widths.merged), call.query = shared.take<float>(tokens * widths.query);
  call.context = shared.take<float>(tokens * widths.context), call.intermediate = shared.take<float>(tokens * widths.intermediate);
  call.branch = take(shared, features);
  call.sums[0] = take(shared, features), call.sums[1] = take(shared, features);
  call.logits = shared.take<float>(tokens * widths.logits), call.mixture = shared.take<char>(widths.mixture_bytes);
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
    sequences[i] = sequences_of(call, layer, l, reals_of[i], step, arguments);
    STD_TORCH_CHECK(!mask || mask->size(1) == 1 || mask->size(1) == l.heads, "hf_cpu_accel::decoder_layers: mask must have 1 or ", l.heads,
                    " heads");
    layer.attention = plan_attention(sequences[i].data(), step.batch, l.kv_heads, threads, layer.few);
    widths.buffer = std::max(widths.buffer, layer.attention.scratch_floats);
    widths.partials = std::max(widths.partials, layer.attention.partial_floats * layer.attention.tasks);
    if (layer.crosses) {
      crossings[i] = crossing_of(call, i, l, reals_of[i], step.batch, crossing);
      layer.cross = plan_attention(crossings[i].data(), static_cast<int64_t>(crossings[i].size()), l.cross_kv_heads, threads, true);
      widths.buffer = std::max(widths.buffer, layer.cross.scratch_floats);
      widths.partials = std::max(widths.partials, layer.cross.partial_floats * layer.cross.tasks);
      layer.cross_query.write_to({call.merged, l.cross_heads * l.cross_head_dim});
    }
    layer.qkv.write_to({call.merged, l.qkv_features});
    layer.router.logits.write_to({call.logits, layer.router.logits.n});
    layer.up.write_to({call.intermediate, l.intermediate_features});
    if (layer.up.gated)
      layer.up.outputs[1] = layer.up.outputs[0], layer.up.output_begin[1] = l.intermediate_features, layer.up.output_begin[2] = layer.up.n;
  }
  if (step.rows) check_rows(step, keys, values);
  if (call.tokens == 0 || features == 0) return result;
  widths.buffer = std::max(widths.buffer, norm_buffer_rows * features);

  // Memory of each thread, or of all together.
  const int64_t memories = own ? threads : 1, expert_rows = widths.expert_words > 0 ? std::min(tokens, most_block_rows) : 0;
  Workspace workspace(static_cast<size_t>(memories) * (GemmMemory::size_of(tokens, widths.words) + 3 * floats(features)) +
                      static_cast<size_t>(threads) *
                          (Workspace::size_of<float>(widths.head_group) + Workspace::size_of<float>(widths.buffer) +
                           GemmMemory::size_of(expert_rows, widths.expert_words)) +
                      Workspace::size_of<float>(widths.partials));
  std::vector<DecoderMemory> memory;
  for (int64_t i = 0; i < threads; ++i) {
    if (i < memories) {
      GemmMemory gemm(workspace, tokens, widths.words);
      gemm.own = own;
      const Matrix normed = take(workspace, features), first = take(workspace, features), second = take(workspace, features);
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

STABLE_TORCH_LIBRARY_FRAGMENT(hf_cpu_accel, m) {
  m.def(
      "decoder_layers(Tensor hidden_states, Tensor[] weights, Tensor vectors, Tensor layout, Tensor scalars, Tensor(a!)[] keys, Tensor(b!)[] values, "
      "int[] past, Tensor[] rotary, Tensor? start, Tensor? rows, Tensor? mask, Tensor[] cross_keys, Tensor[] cross_values, Tensor? cross_padding, "
      "Tensor? cross_rows) -> "
      "Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(hf_cpu_accel, CPU, m) { m.impl("decoder_layers", TORCH_BOX(&hfca::decoder_layers)); }
