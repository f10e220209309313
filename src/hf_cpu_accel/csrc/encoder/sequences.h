// The sequences of a call of an encoder layer: which rows are computed, and what the attention of each sees.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "../attention/arguments.h"
#include "encoder_layer.h"

namespace hfca {

constexpr const char* encoder_op = "encoder_layer";

// Which rows of [batch, length] are computed: those from the first to the last token of each sequence.
struct Tokens {
  std::vector<int64_t> first, begin, count;  // per sequence: its first row here, where it begins in the padded sequence, how many
  std::vector<int32_t> index;               // row of [batch * length] of each row here; empty if all are
  int64_t total = 0;
};

// `padding` [batch, length], dense rows, or null: all are tokens.
inline Tokens tokens_of(const bool* padding, int64_t batch_stride, int64_t batch, int64_t length) {
  Tokens tokens;
  for (int64_t b = 0; b < batch; ++b) {
    const TokenRange range = padding ? token_range(padding + b * batch_stride, length) : TokenRange{0, length};
    tokens.first.push_back(tokens.total);
    tokens.begin.push_back(range.begin);
    tokens.count.push_back(range.end - range.begin);
    tokens.total += range.end - range.begin;
  }
  if (tokens.total == batch * length) return tokens;
  tokens.index.reserve(static_cast<size_t>(tokens.total));
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t i = 0; i < tokens.count[b]; ++i) tokens.index.push_back(static_cast<int32_t>(b * length + tokens.begin[b] + i));
  return tokens;
}

// Sequences whose tokens lie anywhere: `rows` int32 [sequences, length], the row of each token, every row of the input once.
inline Tokens tokens_at(const Tensor& rows, int64_t total) {
  STD_TORCH_CHECK(
      rows.scalar_type() == ScalarType::Int && rows.is_cpu() && rows.dim() == 2 && rows.is_contiguous() && rows.numel() == total,
      "hf_cpu_accel::encoder_layer: rows must be contiguous int32 [sequences, length] with one number for each of ", total, " tokens");
  Tokens tokens;
  for (int64_t s = 0; s < rows.size(0); ++s) tokens.first.push_back(s * rows.size(1));
  tokens.begin.assign(tokens.first.size(), 0), tokens.count.assign(tokens.first.size(), rows.size(1));
  const auto* row = static_cast<const int32_t*>(rows.const_data_ptr());
  tokens.index.assign(row, row + total), tokens.total = total;
  std::vector<bool> seen(static_cast<size_t>(total));
  for (const int32_t place : tokens.index) {
    const bool fresh = place >= 0 && place < total && !seen[static_cast<size_t>(place)];
    STD_TORCH_CHECK(fresh, "hf_cpu_accel::encoder_layer: rows must hold each number from 0 to ", total - 1, " once, and has ", place);
    seen[static_cast<size_t>(place)] = true;
  }
  return tokens;
}

// Padding comes out as zeros.
inline void clear_padding(Matrix result, const Tokens& tokens, int64_t length, int64_t features) {
  const size_t bytes = static_cast<size_t>(features) * (result.bf16 ? 2 : 4);
  for (size_t b = 0; b < tokens.count.size(); ++b)
    for (int64_t i = 0; i < length; ++i)
      if (i < tokens.begin[b] || i >= tokens.begin[b] + tokens.count[b])
        std::memset(static_cast<char*>(result.data) + static_cast<size_t>(static_cast<int64_t>(b) * length + i) * bytes, 0, bytes);
}

// What keys a query sees and what is added to its scores, besides the padding.
struct Scores {
  OptionalTensor mask, relative;
  const RelativePositions* positions = nullptr;
  int64_t window = 0;
  bool shared = false;  // sequences take the masks in turn
};

// Which keys of a sequence are padding, and a mask [.., length, length] from its first token on, in one: [heads, count, count].
inline std::vector<float> masked_holes(const Attention& a, const bool* row, int64_t heads) {
  const auto value = [&](int64_t at) {
    switch (a.mask_kind) {
      case MaskKind::boolean: return static_cast<const bool*>(a.mask)[at] ? 0.0f : -INFINITY;
      case MaskKind::bfloat16: return widened(static_cast<const uint16_t*>(a.mask)[at]);
      default: return static_cast<const float*>(a.mask)[at];
    }
  };
  std::vector<float> both;
  both.reserve(static_cast<size_t>(heads * a.q_len * a.q_len));
  for (int64_t h = 0; h < heads; ++h)
    for (int64_t q = 0; q < a.q_len; ++q)
      for (int64_t k = 0; k < a.q_len; ++k)
        both.push_back(row[k] ? value(h * a.mask_head_stride + q * a.mask_query_stride + k) : -INFINITY);
  return both;
}

// The attention of each sequence over rows of query, key and value [tokens, heads * head_size].
inline std::vector<AttentionSequence> sequences_of(const EncoderLayer& layer, const Tokens& tokens, int64_t head_size, double scale,
                                                   const OptionalTensor& padding, const Scores& scores, int64_t heads, int64_t length,
                                                   Tensor& keep_mask, std::vector<std::vector<float>>& keep_holes) {
  Attention shared;
  shared.head_dim = shared.value_dim = head_size;
  shared.scale = static_cast<float>(scale);
  shared.positions = scores.positions;
  shared.quantized = layer.bf16_intermediates && layer.qkv.kind == WeightKind::int8;
  // Attention knows causality, a window that ends with the query, and biases for keys before it. Here queries look both ways: they stand
  // so many positions further on, behind the last key that they see, or that has a bias of its own.
  int64_t ahead = 0;
  if (scores.relative) {
    const Tensor& table = *scores.relative;
    STD_TORCH_CHECK(table.scalar_type() == ScalarType::Float && table.is_cpu() && table.dim() == 2 && table.size(0) == heads &&
                        table.size(1) % 2 == 1 && table.is_contiguous() && scores.window == 0,
                    "hf_cpu_accel::encoder_layer: relative must be float32 [", heads,
                    ", an odd number], contiguous, and excludes a window");
    shared.relative = static_cast<const float*>(table.const_data_ptr()), shared.relative_count = table.size(1);
    ahead = table.size(1) / 2;
  }
  if (scores.window > 0) shared.causal = true, shared.window = 2 * scores.window + 1, ahead = scores.window;
  const int64_t count = static_cast<int64_t>(tokens.count.size());
  const int64_t masks = scores.mask && scores.mask->dim() == 4 ? std::max(scores.mask->size(0), int64_t{1}) : 1;
  STD_TORCH_CHECK(masks == 1 || (scores.shared ? count % masks == 0 : masks == count), "hf_cpu_accel::encoder_layer: ", count,
                  " sequences cannot share ", masks, " masks");
  if (scores.mask) read_mask(shared, *scores.mask, {masks, heads, length, length}, encoder_op, keep_mask);
  const int64_t mask_bytes = shared.mask_kind == MaskKind::boolean ? 1 : shared.mask_kind == MaskKind::bfloat16 ? 2 : 4;
  std::vector<AttentionSequence> sequences;
  for (size_t b = 0; b < tokens.count.size(); ++b) {
    Attention a = shared;
    const int64_t count = tokens.count[b], begin = tokens.begin[b];
    a.q_len = count, a.kv_len = count + ahead;
    const auto heads_of = [&](const Matrix& x) {
      return Heads{rows_from(x, tokens.first[b]).data, 0, head_size, x.stride, floating(x.bf16)};
    };
    a.query = heads_of(layer.query), a.key = heads_of(layer.key), a.value = heads_of(layer.value), a.output = heads_of(layer.context);
    if (scores.mask)
      a.mask = static_cast<const char*>(a.mask) +
               (static_cast<int64_t>(b) % masks * a.mask_batch_stride + begin * (a.mask_query_stride + 1)) * mask_bytes;
    const bool* row =
        padding ? static_cast<const bool*>(padding->const_data_ptr()) + static_cast<int64_t>(b) * padding->stride(0) + begin : nullptr;
    if (row && has_holes(row, {0, count})) {
      if (scores.mask) {
        keep_holes.push_back(masked_holes(a, row, heads));
        a.mask_kind = MaskKind::float32, a.mask = keep_holes.back().data(), a.mask_head_stride = count * count, a.mask_query_stride = count;
      } else {
        a.mask_kind = MaskKind::boolean, a.mask = row;
      }
    }
    sequences.push_back({a, 0, 0, count});
  }
  return sequences;
}

}  // namespace hfca
