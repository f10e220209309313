// The sequences of a call whose attention the layers compute: each over its rows of the cache, and over those of the encoder's output.
#pragma once
#include <algorithm>
#include <vector>

#include "arguments.h"

namespace hfca {

// What all layers see alike.
struct DecoderStep {
  int64_t batch = 0, q_len = 0, longest = 0;
  const int32_t *start = nullptr, *rows = nullptr;
  int64_t rows_stride = 0;
  Attention mask;  // only its mask
};

// That the rows of the positions that are looked at are there in all caches.
inline void check_rows(const DecoderStep& step, const std::vector<Tensor>& keys, const std::vector<Tensor>& values) {
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
inline std::vector<AttentionSequence> sequences_of(const DecoderCall& call, const DecoderLayer& layer, const LayerLayout& l,
                                                   const LayerScalars& s, const DecoderStep& step, const LayerArguments& arguments) {
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
    const int64_t origin = (step.start ? step.start[b] : 0) - forgotten;
    sequences.push_back({a, row, std::min(std::max<int64_t>(origin, 0), a.kv_len), a.kv_len, origin});
  }
  return sequences;
}

// The encoder's keys or values [encoder_sequences, kv_heads, length, features]: kernels only read them.
struct CrossCache {
  const std::vector<Tensor>&keys, &values;
  const OptionalTensor& padding;
  const int32_t* rows;  // [batch], the encoder sequence of each; null: its own

  Heads heads(const Tensor& t, const char* name, int64_t encoder_sequences, int64_t kv_heads, int64_t length, int64_t features) const {
    const HeadType type = head_type(t, decoder_op, name);
    const int64_t width = width_of(type, features);
    STD_TORCH_CHECK(t.dim() == 4 && t.size(0) == encoder_sequences && t.size(1) == kv_heads && t.size(2) == length && t.size(3) == width &&
                        (width == 1 || t.stride(3) == 1),
                    "hf_cpu_accel::decoder_layers: ", name, " must be [", encoder_sequences, ", ", kv_heads, ", ", length, ", ", width,
                    "], with a dense last dimension");
    return {const_cast<void*>(t.const_data_ptr()), t.stride(0), t.stride(1), t.stride(2), type};
  }

  int64_t encoder_sequence_of(int64_t sequence) const { return rows ? rows[sequence] : sequence; }
  const bool* padding_of(int64_t sequence) const {
    return static_cast<const bool*>(padding->const_data_ptr()) + sequence * padding->stride(0);
  }

  // Whether two sequences look at the very same keys.
  bool alike(int64_t one, int64_t other, int64_t length) const {
    return encoder_sequence_of(one) == encoder_sequence_of(other) &&
           (!padding || std::equal(padding_of(one), padding_of(one) + length, padding_of(other)));
  }
};

// The attention of a layer over the encoder's output. Beams of one encoder sequence follow one another and look at the
// same keys: they are so many queries of one sequence, which share the reading of them.
inline std::vector<AttentionSequence> cross_sequences_of(const DecoderCall& call, size_t number, const LayerLayout& l,
                                                         const LayerScalars& s, int64_t batch, const CrossCache& cache) {
  const int64_t length = cache.keys[number].dim() == 4 ? cache.keys[number].size(2) : 0;
  const int64_t encoder_sequences = cache.rows && cache.keys[number].dim() == 4 ? cache.keys[number].size(0) : batch;
  Attention shared;
  shared.group = l.cross_heads / l.cross_kv_heads, shared.head_dim = l.cross_head_dim, shared.value_dim = l.cross_value_dim;
  shared.kv_len = length, shared.scale = static_cast<float>(s.cross_scale);
  shared.key = cache.heads(cache.keys[number], "cross_keys", encoder_sequences, l.cross_kv_heads, length, l.cross_head_dim);
  shared.value = cache.heads(cache.values[number], "cross_values", encoder_sequences, l.cross_kv_heads, length, l.cross_value_dim);
  if (cache.padding)
    STD_TORCH_CHECK(cache.padding->scalar_type() == ScalarType::Bool && cache.padding->dim() == 2 && cache.padding->size(0) == batch &&
                        cache.padding->size(1) == length && (length <= 1 || cache.padding->stride(1) == 1),
                    "hf_cpu_accel::decoder_layers: cross_padding must be boolean [", batch, ", ", length, "], dense");
  std::vector<AttentionSequence> sequences;
  sequences.reserve(call.sequences.size());
  for (int64_t b = 0, next = 0; b < batch; b = next) {
    STD_TORCH_CHECK(0 <= cache.encoder_sequence_of(b) && cache.encoder_sequence_of(b) < encoder_sequences,
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
    sequences.push_back({a, cache.encoder_sequence_of(b), range.begin, range.end});
  }
  return sequences;
}

}  // namespace hfca
