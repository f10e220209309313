// encoder_layer: schema, checks, cutting out the padding, call.
#include <cmath>
#include <cstring>

#include "attention/arguments.h"
#include "encoder/encoder_layer.h"
#include "gemm/arguments.h"

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

// Padding comes out as zeros.
void clear_padding(Matrix result, const Tokens& tokens, int64_t length, int64_t features) {
  const size_t bytes = static_cast<size_t>(features) * (result.bf16 ? 2 : 4);
  for (size_t b = 0; b < tokens.count.size(); ++b)
    for (int64_t i = 0; i < length; ++i)
      if (i < tokens.begin[b] || i >= tokens.begin[b] + tokens.count[b])
        std::memset(static_cast<char*>(result.data) + static_cast<size_t>(static_cast<int64_t>(b) * length + i) * bytes, 0, bytes);
}

Norm norm_of(const std::optional<Tensor>& weight, const std::optional<Tensor>& bias, double eps, int64_t features) {
  Norm norm;
  norm.columns = features;
  norm.weight = as_vector(weight, features, op, "norm weight");
  norm.bias = as_vector(bias, features, op, "norm bias");
  norm.eps = static_cast<float>(eps);
  return norm;
}

// The attention of each sequence over rows of query, key and value [tokens, heads * head_size].
std::vector<AttentionSequence> sequences_of(const EncoderLayer& layer, const Tokens& tokens, int64_t head_size, double scale,
                                            const std::optional<Tensor>& padding, const std::optional<Tensor>& mask, int64_t heads, int64_t length,
                                            Tensor& keep_mask) {
  Attention shared;
  shared.head_dim = shared.value_dim = head_size;
  shared.scale = static_cast<float>(scale);
  shared.quantised = layer.narrow && layer.qkv.kind == WeightKind::int8;
  if (mask) read_mask(shared, *mask, {static_cast<int64_t>(tokens.count.size()), heads, length, length}, op, keep_mask);
  const int64_t mask_bytes = shared.mask_kind == MaskKind::boolean ? 1 : shared.mask_kind == MaskKind::bfloat16 ? 2 : 4;
  std::vector<AttentionSequence> sequences;
  for (size_t b = 0; b < tokens.count.size(); ++b) {
    Attention a = shared;
    a.q_len = a.kv_len = tokens.count[b];
    const auto heads_of = [&](const Matrix& x) { return Heads{rows_from(x, tokens.first[b]).data, 0, head_size, x.stride, floating(x.bf16)}; };
    a.query = heads_of(layer.query), a.key = heads_of(layer.key), a.value = heads_of(layer.value), a.output = heads_of(layer.context);
    if (mask) {
      a.mask = static_cast<const char*>(a.mask) + static_cast<int64_t>(b) * a.mask_batch_stride * mask_bytes;
    } else if (padding) {
      const bool* row = static_cast<const bool*>(padding->const_data_ptr()) + static_cast<int64_t>(b) * padding->stride(0) + tokens.begin[b];
      if (has_holes(row, {0, a.kv_len})) a.mask_kind = MaskKind::boolean, a.mask = row;
    }
    sequences.push_back({a, 0, 0, a.kv_len});
  }
  return sequences;
}

Tensor encoder_layer(const Tensor& hidden_states, const std::optional<Tensor>& padding, const std::optional<Tensor>& mask, const Tensor& qkv,
                     const std::optional<Tensor>& qkv_scale, const std::optional<Tensor>& qkv_bias, const std::vector<int64_t>& order,
                     int64_t head_size, std::optional<double> attention_scale, const Tensor& output, const std::optional<Tensor>& output_scale,
                     const std::optional<Tensor>& output_bias, const std::optional<Tensor>& attention_norm_weight,
                     const std::optional<Tensor>& attention_norm_bias, double attention_norm_eps, const Tensor& up,
                     const std::optional<Tensor>& up_scale, const std::optional<Tensor>& up_bias, const Tensor& down,
                     const std::optional<Tensor>& down_scale, const std::optional<Tensor>& down_bias, int64_t intermediate_features,
                     const std::string& activation, const std::optional<Tensor>& ffn_norm_weight, const std::optional<Tensor>& ffn_norm_bias,
                     double ffn_norm_eps, int64_t attention_features, bool norm_before, bool narrow) {
  check_floating(hidden_states, op, "hidden_states");
  STD_TORCH_CHECK(hidden_states.dim() == 3, "hf_cpu_accel::encoder_layer: hidden_states must be [batch, length, features]");
  const int64_t batch = hidden_states.size(0), length = hidden_states.size(1), features = hidden_states.size(2);
  STD_TORCH_CHECK(batch * length <= INT32_MAX, "hf_cpu_accel::encoder_layer: at most 2^31 - 1 tokens");
  STD_TORCH_CHECK(head_size >= 1 && attention_features >= 1 && attention_features % head_size == 0,
                  "hf_cpu_accel::encoder_layer: attention_features must be a multiple of head_size");
  STD_TORCH_CHECK(order.size() == 3 && (1 << order[0] | 1 << order[1] | 1 << order[2]) == 7,
                  "hf_cpu_accel::encoder_layer: order must be a permutation of 0, 1, 2");
  STD_TORCH_CHECK(!(padding && mask), "hf_cpu_accel::encoder_layer: padding and mask exclude each other");

  Tensor keep_padding = hidden_states, keep_mask = hidden_states, keep_input = hidden_states;
  const bool* tokens_in = nullptr;
  if (padding) {
    STD_TORCH_CHECK(padding->scalar_type() == ScalarType::Bool && padding->dim() == 2 && padding->size(0) == batch && padding->size(1) == length,
                    "hf_cpu_accel::encoder_layer: padding must be boolean [batch, length], true where there is a token");
    keep_padding = length == 1 || padding->stride(1) == 1 ? *padding : torch::stable::contiguous(*padding);
    tokens_in = static_cast<const bool*>(keep_padding.const_data_ptr());
  }
  const Tokens tokens = tokens_of(tokens_in, padding ? keep_padding.stride(0) : 0, batch, length);

  EncoderLayer layer;
  layer.tokens = tokens.total, layer.features = features, layer.attention_features = attention_features, layer.norm_before = norm_before, layer.narrow = narrow;
  layer.qkv = gemm_of(op, tokens.total, 3 * attention_features, features, qkv, qkv_scale, qkv_bias);
  layer.output = gemm_of(op, tokens.total, features, attention_features, output, output_scale, output_bias);
  layer.up = gemm_of(op, tokens.total, intermediate_features, features, up, up_scale, up_bias, activation_of(activation, op));
  layer.down = gemm_of(op, tokens.total, features, intermediate_features, down, down_scale, down_bias);
  layer.attention_norm = norm_of(attention_norm_weight, attention_norm_bias, attention_norm_eps, features);
  layer.ffn_norm = norm_of(ffn_norm_weight, ffn_norm_bias, ffn_norm_eps, features);
  split_outputs(layer.qkv, {attention_features, attention_features, attention_features}, op);

  Tensor result = empty_of(hidden_states, sizes_of(hidden_states));
  layer.result = {result.mutable_data_ptr(), features, is_bf16(result)};
  if (!tokens.index.empty() || tokens.total == 0) clear_padding(layer.result, tokens, length, features);
  if (tokens.total == 0 || features == 0) return result;
  layer.input = as_rows(hidden_states, keep_input);
  if (!tokens.index.empty()) layer.input.index = layer.result.index = tokens.index.data();

  Workspace heads(4 * layer.size_of(tokens.total, attention_features));
  for (int i = 0; i < 3; ++i) layer.qkv.outputs[i] = layer.take(heads, tokens.total, attention_features);
  layer.query = layer.qkv.outputs[order[0]], layer.key = layer.qkv.outputs[order[1]], layer.value = layer.qkv.outputs[order[2]];
  layer.context = layer.take(heads, tokens.total, attention_features);
  const double scale = attention_scale ? *attention_scale : 1.0 / std::sqrt(static_cast<double>(head_size));
  const int64_t heads_count = attention_features / head_size;
  std::vector<AttentionSequence> sequences =
      sequences_of(layer, tokens, head_size, scale, padding ? std::optional(keep_padding) : std::nullopt, mask, heads_count, length, keep_mask);

  const int64_t threads = team_size(multiply_adds(layer.qkv) + multiply_adds(layer.output) + multiply_adds(layer.up) + multiply_adds(layer.down));
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

STABLE_TORCH_LIBRARY_FRAGMENT(hf_cpu_accel, m) {
  m.def(
      "encoder_layer(Tensor hidden_states, Tensor? padding, Tensor? mask, Tensor qkv, Tensor? qkv_scale, Tensor? qkv_bias, int[] order, "
      "int head_size, float? attention_scale, Tensor output, Tensor? output_scale, Tensor? output_bias, Tensor? attention_norm_weight, "
      "Tensor? attention_norm_bias, float attention_norm_eps, Tensor up, Tensor? up_scale, Tensor? up_bias, Tensor down, Tensor? down_scale, "
      "Tensor? down_bias, int intermediate_features, str activation, Tensor? ffn_norm_weight, Tensor? ffn_norm_bias, float ffn_norm_eps, "
      "int attention_features, bool norm_before, bool narrow) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(hf_cpu_accel, CPU, m) { m.impl("encoder_layer", TORCH_BOX(&hfca::encoder_layer)); }
