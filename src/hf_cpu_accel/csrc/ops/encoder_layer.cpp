// encoder_layer: schema, checks, cutting out the padding, call.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "../attention/arguments.h"
#include "../encoder/encoder_layer.h"
#include "../gemm/arguments.h"

namespace hfca {
namespace {

constexpr const char* op = "encoder_layer";

// Which rows of [batch, length] are computed: those from the first to the last token of each sequence.
struct Tokens {
  std::vector<int64_t> first, begin, count;  // per sequence: its first row here, where it begins in the padded sequence, how many
  std::vector<int32_t> index;               // row of [batch * length] of each row here; empty if all are
  int64_t total = 0;
};

// `padding` [batch, length], dense rows, or null: all are tokens.
Tokens tokens_of(const bool* padding, int64_t batch_stride, int64_t batch, int64_t length) {
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
Tokens tokens_at(const Tensor& rows, int64_t total) {
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
void clear_padding(Matrix result, const Tokens& tokens, int64_t length, int64_t features) {
  const size_t bytes = static_cast<size_t>(features) * (result.bf16 ? 2 : 4);
  for (size_t b = 0; b < tokens.count.size(); ++b)
    for (int64_t i = 0; i < length; ++i)
      if (i < tokens.begin[b] || i >= tokens.begin[b] + tokens.count[b])
        std::memset(static_cast<char*>(result.data) + static_cast<size_t>(static_cast<int64_t>(b) * length + i) * bytes, 0, bytes);
}

OptionalNorm norm_of(int64_t kind, const OptionalTensor& weight, const OptionalTensor& bias, double eps, int64_t features) {
  STD_TORCH_CHECK(0 <= kind && kind <= 2,
                  "hf_cpu_accel::encoder_layer: norms must be of the kinds 0 (none), 1 (layer norm) or 2 (RMS norm)");
  return optional_norm(kind, as_vector(weight, features, op, "norm weight"), as_vector(bias, features, op, "norm bias"), eps, features);
}

// Tables [1 or batch, length, rotated features of a head]; `keep` holds their memory.
Rotation rotation_of(const Tensor& cos, const Tensor& sin, const Tokens& tokens, int64_t length, int64_t heads, int64_t head_size,
                     Tensor (&keep)[2]) {
  check_floating(cos, op, "cos");
  check_floating(sin, op, "sin");
  const int64_t batch = static_cast<int64_t>(tokens.count.size());
  STD_TORCH_CHECK(cos.dim() == 3 && (cos.size(0) == 1 || cos.size(0) == batch) && cos.size(1) == length && cos.size(2) % 2 == 0 &&
                      cos.size(2) <= head_size && sizes_of(sin) == sizes_of(cos),
                  "hf_cpu_accel::encoder_layer: cos and sin must be [1 or ", batch, ", ", length, ", an even number up to ", head_size,
                  "]");
  keep[0] = torch::stable::contiguous(cos), keep[1] = torch::stable::contiguous(sin);
  Rotation r;
  r.cos = {keep[0].mutable_data_ptr(), is_bf16(cos)}, r.sin = {keep[1].mutable_data_ptr(), is_bf16(sin)};
  r.position_stride = cos.size(2), r.batch_stride = cos.size(0) == 1 ? 0 : length * r.position_stride, r.half = cos.size(2) / 2;
  r.length = length, r.heads = heads, r.head_size = head_size;
  r.index = tokens.index.empty() ? nullptr : tokens.index.data();
  return r;
}

// What keys a query sees and what is added to its scores, besides the padding.
struct Scores {
  OptionalTensor mask, relative;
  const RelativePositions* positions = nullptr;
  int64_t window = 0;
  bool shared = false;  // sequences take the masks in turn
};

float widened(uint16_t bfloat16) {
  const uint32_t bits = static_cast<uint32_t>(bfloat16) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Which keys of a sequence are padding, and a mask [.., length, length] from its first token on, in one: [heads, count, count].
std::vector<float> masked_holes(const Attention& a, const bool* row, int64_t heads) {
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
std::vector<AttentionSequence> sequences_of(const EncoderLayer& layer, const Tokens& tokens, int64_t head_size, double scale,
                                            const OptionalTensor& padding, const Scores& scores, int64_t heads, int64_t length,
                                            Tensor& keep_mask, std::vector<std::vector<float>>& keep_holes) {
  Attention shared;
  shared.head_dim = shared.value_dim = head_size;
  shared.scale = static_cast<float>(scale);
  shared.positions = scores.positions;
  shared.quantised = layer.bf16_intermediates && layer.qkv.kind == WeightKind::int8;
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
  if (scores.mask) read_mask(shared, *scores.mask, {masks, heads, length, length}, op, keep_mask);
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

Tensor encoder_layer(const Tensor& hidden_states, const OptionalTensor& padding, const OptionalTensor& mask, const OptionalTensor& relative,
                     const OptionalTensor& cos, const OptionalTensor& sin, int64_t window, const OptionalTensor& position_keys,
                     const OptionalTensor& position_queries, const OptionalTensor& position_index, const Tensor& qkv,
                     const OptionalTensor& qkv_scale, const OptionalTensor& qkv_bias, const std::vector<int64_t>& order, int64_t head_size,
                     std::optional<double> attention_scale, const Tensor& output, const OptionalTensor& output_scale,
                     const OptionalTensor& output_bias, const OptionalTensor& attention_norm_weight,
                     const OptionalTensor& attention_norm_bias, double attention_norm_eps, const Tensor& up, const OptionalTensor& up_scale,
                     const OptionalTensor& up_bias, const Tensor& down, const OptionalTensor& down_scale, const OptionalTensor& down_bias,
                     int64_t intermediate_features, const Text& activation, const OptionalTensor& ffn_norm_weight,
                     const OptionalTensor& ffn_norm_bias, double ffn_norm_eps, int64_t attention_features, bool norm_before, bool narrow,
                     const std::vector<int64_t>& norms, bool gated, const OptionalTensor& attention_gain, const OptionalTensor& ffn_gain,
                     const OptionalTensor& rows) {
  check_floating(hidden_states, op, "hidden_states");
  STD_TORCH_CHECK(hidden_states.dim() == 3, "hf_cpu_accel::encoder_layer: hidden_states must be [batch, length, features]");
  STD_TORCH_CHECK(!rows || (rows->dim() == 2 && !padding && !cos),
                  "hf_cpu_accel::encoder_layer: rows must be [sequences, length], and exclude padding and rotation");
  const int64_t total = hidden_states.size(0) * hidden_states.size(1), features = hidden_states.size(2);
  const int64_t batch = rows ? rows->size(0) : hidden_states.size(0), length = rows ? rows->size(1) : hidden_states.size(1);
  STD_TORCH_CHECK(total <= INT32_MAX, "hf_cpu_accel::encoder_layer: at most 2^31 - 1 tokens");
  constexpr int64_t in_order[] = {0, 1, 2};
  STD_TORCH_CHECK(head_size >= 1 && attention_features >= 1 && attention_features % head_size == 0,
                  "hf_cpu_accel::encoder_layer: attention_features must be a multiple of head_size");
  STD_TORCH_CHECK(order.size() == 3 && std::is_permutation(order.begin(), order.end(), in_order),
                  "hf_cpu_accel::encoder_layer: order must be a permutation of 0, 1, 2");
  STD_TORCH_CHECK(norms.size() == 2 && norms[1] != 0 && (norm_before || norms[0] != 0),
                  "hf_cpu_accel::encoder_layer: there must be two norms; only the first of two that come before may be missing");
  STD_TORCH_CHECK(norm_before || !(attention_gain || ffn_gain), "hf_cpu_accel::encoder_layer: gains go with norms that come before");
  STD_TORCH_CHECK(!gated || intermediate_features % panel_columns == 0,
                  "hf_cpu_accel::encoder_layer: a gated FFN's width must be a multiple of ", panel_columns);
  STD_TORCH_CHECK(window >= 0 && window <= INT32_MAX && cos.has_value() == sin.has_value(),
                  "hf_cpu_accel::encoder_layer: window must not be negative, cos and sin go together");

  Tensor keep_padding = hidden_states, keep_mask = hidden_states, keep_input = hidden_states,
         keep_tables[2] = {hidden_states, hidden_states};
  const bool* tokens_in = nullptr;
  if (padding) {
    STD_TORCH_CHECK(padding->scalar_type() == ScalarType::Bool && padding->dim() == 2 && padding->size(0) == batch &&
                        padding->size(1) == length,
                    "hf_cpu_accel::encoder_layer: padding must be boolean [batch, length], true where there is a token");
    keep_padding = length == 1 || padding->stride(1) == 1 ? *padding : torch::stable::contiguous(*padding);
    tokens_in = static_cast<const bool*>(keep_padding.const_data_ptr());
  }
  const Tokens tokens = rows ? tokens_at(*rows, total) : tokens_of(tokens_in, padding ? keep_padding.stride(0) : 0, batch, length);

  EncoderLayer layer;
  layer.tokens = tokens.total, layer.features = features, layer.attention_features = attention_features, layer.pre_norm = norm_before,
  layer.bf16_intermediates = narrow;
  layer.intermediate_features = intermediate_features;
  layer.qkv = gemm_of(op, tokens.total, times_features(3, attention_features), features, qkv, qkv_scale, qkv_bias);
  layer.output = gemm_of(op, tokens.total, features, attention_features, output, output_scale, output_bias);
  layer.up = gemm_of(op, tokens.total, times_features(gated ? 2 : 1, intermediate_features), features, up, up_scale, up_bias,
                     activation_of(activation, op));
  layer.up.gated = gated;
  layer.down = gemm_of(op, tokens.total, features, intermediate_features, down, down_scale, down_bias);
  layer.attention_norm = norm_of(norms[0], attention_norm_weight, attention_norm_bias, attention_norm_eps, features);
  layer.ffn_norm = norm_of(norms[1], ffn_norm_weight, ffn_norm_bias, ffn_norm_eps, features);
  layer.attention_layer_scale = as_vector(attention_gain, features, op, "attention_gain"),
  layer.ffn_layer_scale = as_vector(ffn_gain, features, op, "ffn_gain");
  split_outputs(layer.qkv, {attention_features, attention_features, attention_features}, op);

  Tensor result = empty_of(hidden_states, sizes_of(hidden_states));
  layer.result = {result.mutable_data_ptr(), features, is_bf16(result)};
  if (tokens.total < total) clear_padding(layer.result, tokens, length, features);
  layer.input = as_rows(hidden_states, keep_input);
  if (!tokens.index.empty()) layer.input.index = layer.result.index = tokens.index.data();

  Workspace heads(4 * layer.size_of(tokens.total, attention_features));
  for (int i = 0; i < 3; ++i) layer.qkv.outputs[i] = layer.take(heads, tokens.total, attention_features);
  layer.query = layer.qkv.outputs[order[0]], layer.key = layer.qkv.outputs[order[1]], layer.value = layer.qkv.outputs[order[2]];
  layer.context = layer.take(heads, tokens.total, attention_features);
  const double scale = attention_scale ? *attention_scale : 1.0 / std::sqrt(static_cast<double>(head_size));
  const int64_t heads_count = attention_features / head_size;
  if (cos) layer.rotation = rotation_of(*cos, *sin, tokens, length, heads_count, head_size, keep_tables);
  std::vector<std::vector<float>> keep_holes;
  std::vector<Tensor> keep_positions;
  RelativePositions positions;
  const bool has_positions = position_keys || position_queries || position_index;
  if (has_positions)
    positions = read_positions(position_keys, position_queries, position_index, length, attention_features, head_size, op, keep_positions);
  STD_TORCH_CHECK(!has_positions || (!relative && window == 0), "hf_cpu_accel::encoder_layer: positions exclude relative and a window");
  std::vector<AttentionSequence> sequences = sequences_of(
      layer, tokens, head_size, scale, padding ? std::optional(keep_padding) : std::nullopt,
      {mask, relative, has_positions ? &positions : nullptr, window, rows.has_value()}, heads_count, length, keep_mask, keep_holes);

  if (tokens.total == 0 || features == 0) return result;
  if (has_positions) positions.packed_floats = dispatch().kernels.attention.position_floats(sequences[0].attention);
  Workspace packed_positions(Workspace::size_of<float>(heads_count * positions.packed_floats));
  positions.packed = packed_positions.take<float>(heads_count * positions.packed_floats);
  const int64_t threads =
      team_size(multiply_adds(layer.qkv) + multiply_adds(layer.output) + multiply_adds(layer.up) + multiply_adds(layer.down));
  const AttentionPlan attention = plan_attention(sequences.data(), batch, heads_count, threads, false);
  const EncoderPlan plan(layer, attention, threads);
  Workspace workspace(static_cast<size_t>(plan.memories()) * BlockMemory::size_of(layer, plan) +
                      Workspace::size_of<float>(plan.scratch_floats * threads));
  std::vector<BlockMemory> memories;
  for (int64_t i = 0; i < plan.memories(); ++i) memories.emplace_back(workspace, layer, plan);
  float* scratch = workspace.take<float>(plan.scratch_floats * threads);
  run_team(threads, [&](Team& team) { run_layer(team, layer, plan, attention, memories.data(), scratch); });
  return result;
}

}  // namespace
}  // namespace hfca

HFCA_OP(
    encoder_layer,
    "(Tensor hidden_states, Tensor? padding, Tensor? mask, Tensor? relative, Tensor? cos, Tensor? sin, int window, "
    "Tensor? position_keys, Tensor? position_queries, Tensor? position_index, Tensor qkv, Tensor? qkv_scale, Tensor? qkv_bias, int[] order, int head_size, float? attention_scale, Tensor output, Tensor? output_scale, "
    "Tensor? output_bias, Tensor? attention_norm_weight, Tensor? attention_norm_bias, float attention_norm_eps, Tensor up, "
    "Tensor? up_scale, Tensor? up_bias, Tensor down, Tensor? down_scale, Tensor? down_bias, int intermediate_features, "
    "str activation, Tensor? ffn_norm_weight, Tensor? ffn_norm_bias, float ffn_norm_eps, int attention_features, bool norm_before, "
    "bool narrow, int[] norms, bool gated, Tensor? attention_gain, Tensor? ffn_gain, Tensor? rows=None) -> Tensor")
