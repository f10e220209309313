// encoder_layer, and the same with weights that are kept: schemas, checks, cutting out the padding, call.
#include <algorithm>
#include <cmath>

#include "../encoder/kept_positions.h"
#include "../encoder/sequences.h"
#include "../gemm/arguments.h"
#include "../kept.h"

namespace hfca {
namespace {

constexpr const char* op = encoder_op;

struct InputArguments {
  const Tensor& hidden_states;
  const OptionalTensor &padding, &mask, &relative, &cos, &sin;
  int64_t window;
  const OptionalTensor &position_keys, &position_queries, &position_index, &rows;
};

struct LinearArguments {
  Tensor weight;
  OptionalTensor scale, bias;
};

struct NormArguments {
  OptionalTensor weight, bias;
  double eps;
};

struct WeightArguments {
  LinearArguments qkv;
  std::vector<int64_t> order;
  int64_t head_size;
  std::optional<double> attention_scale;
  LinearArguments output;
  NormArguments attention_norm;
  LinearArguments up, down;
  int64_t intermediate_features;
  Activation activation;
  NormArguments ffn_norm;
  int64_t attention_features;
  bool norm_before, narrow;
  std::vector<int64_t> norms;
  bool gated;
  OptionalTensor attention_gain, ffn_gain;

  size_t weight_bytes() const {
    size_t bytes = 0;
    for (const LinearArguments* linear : {&qkv, &output, &up, &down})
      bytes += static_cast<size_t>(linear->weight.numel()) * linear->weight.element_size();
    return bytes;
  }
};

struct KeptLayer {
  WeightArguments weights;
  LastPositions positions;
};

OptionalNorm norm_of(int64_t kind, const NormArguments& n, int64_t features) {
  STD_TORCH_CHECK(0 <= kind && kind < norm_kinds,
                  "hf_cpu_accel::encoder_layer: norms must be of the kinds 0 (none), 1 (layer norm) or 2 (RMS norm)");
  return optional_norm(kind, as_vector(n.weight, features, op, "norm weight"), as_vector(n.bias, features, op, "norm bias"), n.eps,
                       features);
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

// last: what the layer keeps between its calls, or null.
Tensor run(const InputArguments& given, const WeightArguments& w, LastPositions* last) {
  const auto& [hidden_states, padding, mask, relative, cos, sin, window, position_keys, position_queries, position_index, rows] = given;
  check_floating(hidden_states, op, "hidden_states");
  STD_TORCH_CHECK(hidden_states.dim() == 3, "hf_cpu_accel::encoder_layer: hidden_states must be [batch, length, features]");
  STD_TORCH_CHECK(!rows || (rows->dim() == 2 && !padding && !cos),
                  "hf_cpu_accel::encoder_layer: rows must be [sequences, length], and exclude padding and rotation");
  const int64_t total = hidden_states.size(0) * hidden_states.size(1), features = hidden_states.size(2);
  const int64_t batch = rows ? rows->size(0) : hidden_states.size(0), length = rows ? rows->size(1) : hidden_states.size(1);
  STD_TORCH_CHECK(total <= INT32_MAX, "hf_cpu_accel::encoder_layer: at most 2^31 - 1 tokens");
  constexpr int64_t in_order[] = {0, 1, 2};
  STD_TORCH_CHECK(w.head_size >= 1 && w.attention_features >= 1 && w.attention_features % w.head_size == 0,
                  "hf_cpu_accel::encoder_layer: attention_features must be a multiple of head_size");
  STD_TORCH_CHECK(w.order.size() == 3 && std::is_permutation(w.order.begin(), w.order.end(), in_order),
                  "hf_cpu_accel::encoder_layer: order must be a permutation of 0, 1, 2");
  STD_TORCH_CHECK(w.norms.size() == 2 && w.norms[1] != 0 && (w.norm_before || w.norms[0] != 0),
                  "hf_cpu_accel::encoder_layer: there must be two norms; only the first of two that come before may be missing");
  STD_TORCH_CHECK(w.norm_before || !(w.attention_gain || w.ffn_gain), "hf_cpu_accel::encoder_layer: gains go with norms that come before");
  STD_TORCH_CHECK(!w.gated || w.intermediate_features % panel_columns == 0,
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
  layer.tokens = tokens.total, layer.features = features, layer.attention_features = w.attention_features, layer.pre_norm = w.norm_before,
  layer.bf16_intermediates = w.narrow;
  layer.intermediate_features = w.intermediate_features;
  layer.qkv = gemm_of(op, tokens.total, times_features(3, w.attention_features), features, w.qkv.weight, w.qkv.scale, w.qkv.bias);
  layer.output = gemm_of(op, tokens.total, features, w.attention_features, w.output.weight, w.output.scale, w.output.bias);
  layer.up = gemm_of(op, tokens.total, times_features(w.gated ? 2 : 1, w.intermediate_features), features, w.up.weight, w.up.scale,
                     w.up.bias, w.activation);
  layer.up.gated = w.gated;
  layer.down = gemm_of(op, tokens.total, features, w.intermediate_features, w.down.weight, w.down.scale, w.down.bias);
  layer.attention_norm = norm_of(w.norms[0], w.attention_norm, features);
  layer.ffn_norm = norm_of(w.norms[1], w.ffn_norm, features);
  layer.attention_layer_scale = as_vector(w.attention_gain, features, op, "attention_gain"),
  layer.ffn_layer_scale = as_vector(w.ffn_gain, features, op, "ffn_gain");
  split_outputs(layer.qkv, {w.attention_features, w.attention_features, w.attention_features}, op);

  Tensor result = empty_of(hidden_states, sizes_of(hidden_states));
  layer.result = {result.mutable_data_ptr(), features, is_bf16(result)};
  if (tokens.total < total) clear_padding(layer.result, tokens, length, features);
  layer.input = as_rows(hidden_states, keep_input);
  if (!tokens.index.empty()) layer.input.index = layer.result.index = tokens.index.data();

  Workspace heads(4 * layer.size_of(tokens.total, w.attention_features));
  for (int i = 0; i < 3; ++i) layer.qkv.outputs[i] = layer.take(heads, tokens.total, w.attention_features);
  layer.query = layer.qkv.outputs[w.order[0]], layer.key = layer.qkv.outputs[w.order[1]], layer.value = layer.qkv.outputs[w.order[2]];
  layer.context = layer.take(heads, tokens.total, w.attention_features);
  const double scale = w.attention_scale ? *w.attention_scale : 1.0 / std::sqrt(static_cast<double>(w.head_size));
  const int64_t heads_count = w.attention_features / w.head_size;
  if (cos) layer.rotation = rotation_of(*cos, *sin, tokens, length, heads_count, w.head_size, keep_tables);
  std::vector<std::vector<float>> keep_holes;
  std::vector<Tensor> keep_positions;
  RelativePositions positions;
  const bool has_positions = position_keys || position_queries || position_index;
  if (has_positions)
    positions =
        read_positions(position_keys, position_queries, position_index, length, w.attention_features, w.head_size, op, keep_positions);
  STD_TORCH_CHECK(!has_positions || (!relative && window == 0), "hf_cpu_accel::encoder_layer: positions exclude relative and a window");
  std::vector<AttentionSequence> sequences = sequences_of(
      layer, tokens, w.head_size, scale, padding ? std::optional(keep_padding) : std::nullopt,
      {mask, relative, has_positions ? &positions : nullptr, window, rows.has_value()}, heads_count, length, keep_mask, keep_holes);

  if (tokens.total == 0 || features == 0) return result;
  std::shared_ptr<const KeptPositions> packed;
  if (has_positions) {
    positions.packed_floats = dispatch().kernels.attention.position_floats(sequences[0].attention);
    packed = last ? last->get() : nullptr;
    positions.is_packed = packed && packed->are(positions, rows.has_value());
    if (!positions.is_packed) packed = std::make_shared<KeptPositions>(positions, std::move(keep_positions), rows.has_value(), heads_count);
    positions.packed = packed->data();
  }
  const int64_t threads =
      team_size(multiply_adds(layer.qkv) + multiply_adds(layer.output) + multiply_adds(layer.up) + multiply_adds(layer.down));
  const AttentionPlan attention = plan_attention(sequences.data(), batch, heads_count, threads, false);
  const EncoderPlan plan(layer, attention, threads);
  Workspace workspace(static_cast<size_t>(plan.memories()) * BlockMemory::size_of(layer, plan) +
                      Workspace::size_of<float>(plan.scratch_floats * threads));
  std::vector<BlockMemory> memories;
  memories.reserve(static_cast<size_t>(plan.memories()));
  for (int64_t i = 0; i < plan.memories(); ++i) memories.emplace_back(workspace, layer, plan);
  float* scratch = workspace.take<float>(plan.scratch_floats * threads);
  run_team(threads, [&](Team& team) { run_layer(team, layer, plan, attention, memories.data(), scratch); });
  // Long sequences have large tables, and packing them is as small a part: no more than an eighth of the weights is kept.
  if (last && packed && !positions.is_packed && 8 * KeptPositions::bytes(positions, heads_count) <= w.weight_bytes()) last->set(packed);
  return result;
}

// What both ops are told of the weights, and what is made of it.
// clang-format off
#define HFCA_WEIGHT_PARAMETERS \
  const Tensor& qkv, const OptionalTensor& qkv_scale, const OptionalTensor& qkv_bias, const std::vector<int64_t>& order, \
  int64_t head_size, std::optional<double> attention_scale, const Tensor& output, const OptionalTensor& output_scale, \
  const OptionalTensor& output_bias, const OptionalTensor& attention_norm_weight, const OptionalTensor& attention_norm_bias, \
  double attention_norm_eps, const Tensor& up, const OptionalTensor& up_scale, const OptionalTensor& up_bias, const Tensor& down, \
  const OptionalTensor& down_scale, const OptionalTensor& down_bias, int64_t intermediate_features, const Text& activation, \
  const OptionalTensor& ffn_norm_weight, const OptionalTensor& ffn_norm_bias, double ffn_norm_eps, int64_t attention_features, \
  bool norm_before, bool narrow, const std::vector<int64_t>& norms, bool gated, const OptionalTensor& attention_gain, \
  const OptionalTensor& ffn_gain
#define HFCA_WEIGHT_ARGUMENTS \
  WeightArguments{{qkv, qkv_scale, qkv_bias}, order, head_size, attention_scale, {output, output_scale, output_bias}, \
  {attention_norm_weight, attention_norm_bias, attention_norm_eps}, {up, up_scale, up_bias}, {down, down_scale, down_bias}, \
  intermediate_features, activation_of(activation, op), {ffn_norm_weight, ffn_norm_bias, ffn_norm_eps}, attention_features, norm_before, \
  narrow, norms, gated, attention_gain, ffn_gain}
// clang-format on

Tensor encoder_layer(const Tensor& hidden_states, const OptionalTensor& padding, const OptionalTensor& mask, const OptionalTensor& relative,
                     const OptionalTensor& cos, const OptionalTensor& sin, int64_t window, const OptionalTensor& position_keys,
                     const OptionalTensor& position_queries, const OptionalTensor& position_index, HFCA_WEIGHT_PARAMETERS,
                     const OptionalTensor& rows) {
  return run({hidden_states, padding, mask, relative, cos, sin, window, position_keys, position_queries, position_index, rows},
             HFCA_WEIGHT_ARGUMENTS, nullptr);
}

// Never destroyed, see ops/values.cpp.
Kept<KeptLayer>& kept() {
  static Kept<KeptLayer>& instance = *new Kept<KeptLayer>;
  return instance;
}

int64_t keep_encoder_layer(HFCA_WEIGHT_PARAMETERS) {
  auto layer = std::make_shared<KeptLayer>();
  layer->weights = HFCA_WEIGHT_ARGUMENTS;
  return kept().keep(std::move(layer));
}

Tensor kept_encoder_layer(const Tensor& hidden_states, const OptionalTensor& padding, const OptionalTensor& mask,
                          const OptionalTensor& relative, const OptionalTensor& cos, const OptionalTensor& sin, int64_t window,
                          const OptionalTensor& position_keys, const OptionalTensor& position_queries, const OptionalTensor& position_index,
                          int64_t number, const OptionalTensor& rows) {
  const std::shared_ptr<KeptLayer> layer = kept().get(number, "kept_encoder_layer");
  return run({hidden_states, padding, mask, relative, cos, sin, window, position_keys, position_queries, position_index, rows},
             layer->weights, &layer->positions);
}

bool drop_encoder_layer(int64_t number) { return kept().drop(number); }

}  // namespace
}  // namespace hfca

#define HFCA_INPUTS                                                                                               \
  "Tensor hidden_states, Tensor? padding, Tensor? mask, Tensor? relative, Tensor? cos, Tensor? sin, int window, " \
  "Tensor? position_keys, Tensor? position_queries, Tensor? position_index, "
#define HFCA_WEIGHTS                                                                                                                  \
  "Tensor qkv, Tensor? qkv_scale, Tensor? qkv_bias, int[] order, int head_size, float? attention_scale, Tensor output, "              \
  "Tensor? output_scale, Tensor? output_bias, Tensor? attention_norm_weight, Tensor? attention_norm_bias, float attention_norm_eps, " \
  "Tensor up, Tensor? up_scale, Tensor? up_bias, Tensor down, Tensor? down_scale, Tensor? down_bias, int intermediate_features, "     \
  "str activation, Tensor? ffn_norm_weight, Tensor? ffn_norm_bias, float ffn_norm_eps, int attention_features, bool norm_before, "    \
  "bool narrow, int[] norms, bool gated, Tensor? attention_gain, Tensor? ffn_gain"

HFCA_OP(encoder_layer, "(" HFCA_INPUTS HFCA_WEIGHTS ", Tensor? rows=None) -> Tensor")
HFCA_OP(kept_encoder_layer, "(" HFCA_INPUTS "int number, Tensor? rows=None) -> Tensor")
HFCA_OP(keep_encoder_layer, "(" HFCA_WEIGHTS ") -> int")
HFCA_OP_WITHOUT_TENSORS(drop_encoder_layer, "(int number) -> bool")
