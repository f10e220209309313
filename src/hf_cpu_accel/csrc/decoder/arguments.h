// From the op's arguments to the layers, the cache and the rotary tables that the kernels work on.
#pragma once
#include "../abi.h"
#include "../attention/arguments.h"
#include "../experts/arguments.h"
#include "decoder_layers.h"

namespace hfca {

constexpr const char* decoder_op = "decoder_layers";
constexpr int64_t largest_head_dim = 1024;

// The op's arguments that describe layers: see ops/decoder/bind.py.
struct LayerArguments {
  const std::vector<Tensor>& weights;
  const float* vectors;
  int64_t elements;

  const float* vector(int64_t first, int64_t count) const {
    if (first < 0) return nullptr;
    STD_TORCH_CHECK(0 <= count && count <= elements && first <= elements - count,
                    "hf_cpu_accel::decoder_layers: layout names elements that vectors does not have");
    return vectors + first;
  }
  Array array(int64_t first, int64_t count) const { return {const_cast<float*>(vector(first, count)), false}; }

  Gemm gemm(const ProjectionLayout& p, int64_t tokens, int64_t n, int64_t k) const {
    const int64_t count = static_cast<int64_t>(weights.size());
    STD_TORCH_CHECK(0 <= p.weight && p.weight < count && p.scale < count,
                    "hf_cpu_accel::decoder_layers: layout names weights that there are not");
    const auto scale = p.scale < 0 ? std::nullopt : OptionalTensor(weights[static_cast<size_t>(p.scale)]);
    Gemm g = gemm_of(decoder_op, tokens, n, k, weights[static_cast<size_t>(p.weight)], scale, std::nullopt);
    g.bias = array(p.bias, n);
    return g;
  }

  OptionalNorm norm(const NormLayout& n, double eps, int64_t features) const {
    STD_TORCH_CHECK(0 <= n.kind && n.kind < norm_kinds, "hf_cpu_accel::decoder_layers: layout names a norm of no kind");
    return optional_norm(n.kind, array(n.weight, features), array(n.bias, features), eps, features);
  }

  HeadNorm head_norm(const NormLayout& n, int64_t scope, double eps, int64_t heads, int64_t head_dim) const {
    STD_TORCH_CHECK(0 <= n.kind && n.kind < norm_kinds && 0 <= scope && scope < norm_scopes,
                    "hf_cpu_accel::decoder_layers: layout names a norm of heads of no kind");
    HeadNorm norm;
    norm.kind = static_cast<NormKind>(n.kind), norm.scope = static_cast<NormScope>(scope);
    const int64_t count = norm.scope == NormScope::head ? head_dim : heads * head_dim;
    norm.weight = vector(n.weight, count), norm.bias = vector(n.bias, count);
    norm.eps = static_cast<float>(eps);
    return norm;
  }
};

// `group` heads for each of the kv_heads.
inline HeadOffsets offsets_of(const HeadsLayout& h, int64_t kv_heads, int64_t group, int64_t width, int64_t features) {
  const auto inside = [&](int64_t place) { return 0 <= place && place <= features; };
  STD_TORCH_CHECK(inside(h.first) && inside(h.stride) && inside(h.head_stride) &&
                      h.first + (kv_heads - 1) * h.stride + (group - 1) * h.head_stride + width <= features,
                  "hf_cpu_accel::decoder_layers: heads lie outside of the qkv projection");
  return {h.first, h.stride, h.head_stride};
}

inline void check_activation(int64_t number) {
  STD_TORCH_CHECK(0 <= number && number < activations, "hf_cpu_accel::decoder_layers: layout names an activation that there is not");
}

// The mixture of experts in place of an FFN, which is its shared expert then.
inline void take_experts(DecoderLayer& layer, const LayerArguments& arguments, const LayerLayout& l, const LayerScalars& s, int64_t tokens,
                         int64_t features) {
  check_activation(l.experts_activation);
  STD_TORCH_CHECK(l.experts <= INT32_MAX && 0 <= l.scoring && l.scoring < scorings,
                  "hf_cpu_accel::decoder_layers: layout names a scoring that there is not");
  const int64_t width = times_features(l.experts_gated ? 2 : 1, l.expert_features);
  layer.mixture =
      mixture_of(decoder_op, arguments.gemm(l.experts_up, tokens, times_features(l.experts, width), features),
                 arguments.gemm(l.experts_down, tokens, times_features(l.experts, features), l.expert_features), l.experts, l.top_k,
                 l.expert_features, features, static_cast<Activation>(l.experts_activation), l.experts_gated != 0, s.experts_limit);
  layer.mixture.shared_up = layer.up, layer.mixture.shared_down = layer.down;
  Router& router = layer.router;
  router.gates_shared = l.shared_gate != 0;
  STD_TORCH_CHECK(!router.gates_shared || layer.up.n > 0, "hf_cpu_accel::decoder_layers: the gate of a shared expert needs that expert");
  router.logits = arguments.gemm(l.router, tokens, l.experts + router.gates_shared, features);
  router.scoring = static_cast<Scoring>(l.scoring), router.renormalize = l.renormalize != 0,
  router.scale = static_cast<float>(s.experts_scale);
  router.choice_bias = arguments.vector(l.choice_bias, l.experts);
  layer.up = layer.down = Gemm();
}

inline TokenHeads token_heads_of(const LayerArguments& arguments, const LayerLayout& l, const LayerScalars& s) {
  const auto offsets = [&](const HeadsLayout& h, int64_t group, int64_t width) {
    return offsets_of(h, l.kv_heads, group, width, l.qkv_features);
  };
  const int64_t group = l.heads / l.kv_heads;
  TokenHeads t;
  t.heads = l.heads, t.kv_heads = l.kv_heads, t.head_dim = l.head_dim, t.value_dim = l.value_dim;
  t.query = offsets(l.query, group, l.head_dim), t.key = offsets(l.key, 1, l.head_dim), t.value = offsets(l.value, 1, l.value_dim);
  t.query_norm = arguments.head_norm(l.query_norm, l.query_norm_scope, s.query_norm_eps, l.heads, l.head_dim);
  t.key_norm = arguments.head_norm(l.key_norm, l.key_norm_scope, s.key_norm_eps, l.kv_heads, l.head_dim);
  t.value_norm = arguments.head_norm(l.value_norm, l.value_norm_scope, s.value_norm_eps, l.kv_heads, l.value_dim);
  STD_TORCH_CHECK(t.value_norm.kind == NormKind::none || l.value_dim <= largest_head_dim,
                  "hf_cpu_accel::decoder_layers: values that are normalized have at most ", largest_head_dim, " features");
  t.rotary_dim = l.rotary_dim, t.interleaved = l.rotary_interleaved != 0;
  t.sub_norm = arguments.head_norm(l.attention_sub_norm, l.attention_sub_norm_scope, s.attention_sub_norm_eps, l.heads, l.value_dim);
  STD_TORCH_CHECK(0 <= l.gate_activation && l.gate_activation < gate_activations,
                  "hf_cpu_accel::decoder_layers: layout names an activation of gates that there is not");
  if (l.gate_activation == 0) return t;
  STD_TORCH_CHECK(l.gate_dim == 1 || l.gate_dim == l.value_dim, "hf_cpu_accel::decoder_layers: a gate has 1 or ", l.value_dim,
                  " features for each head");
  t.gate = {offsets(l.gate, group, l.gate_dim), l.gate_dim, static_cast<GateActivation>(l.gate_activation)};
  return t;
}

inline DecoderLayer layer_of(const LayerArguments& arguments, const LayerLayout& l, const LayerScalars& s, int64_t tokens,
                             int64_t features) {
  DecoderLayer layer;
  STD_TORCH_CHECK(l.kv_heads >= 1 && l.heads >= 1 && l.heads <= INT32_MAX && l.heads % l.kv_heads == 0 && l.head_dim >= 1 &&
                      l.head_dim <= largest_head_dim && l.value_dim >= 1 && l.value_dim <= INT32_MAX,
                  "hf_cpu_accel::decoder_layers: heads must be a multiple of kv_heads and of 1 to ", largest_head_dim, " features");
  STD_TORCH_CHECK(0 <= l.window && l.window <= INT32_MAX && (l.relative < 0 || (1 <= l.relative_count && l.relative_count <= INT32_MAX)),
                  "hf_cpu_accel::decoder_layers: window must not be negative, and relative needs a number for each head");
  STD_TORCH_CHECK(0 <= l.rotary_dim && l.rotary_dim <= l.head_dim && l.rotary_dim % 2 == 0,
                  "hf_cpu_accel::decoder_layers: rotary_dim must be even and at most head_dim");
  layer.qkv = arguments.gemm(l.qkv, tokens, l.qkv_features, features);
  layer.output = arguments.gemm(l.output, tokens, features, l.heads * l.value_dim);
  if (l.up.weight >= 0) {
    check_activation(l.activation);
    layer.up = arguments.gemm(l.up, tokens, times_features(l.gated ? 2 : 1, l.intermediate_features), features);
    layer.up.activation = static_cast<Activation>(l.activation), layer.up.gated = l.gated != 0;
    STD_TORCH_CHECK(!l.gated || l.intermediate_features % panel_columns == 0,
                    "hf_cpu_accel::decoder_layers: a gated FFN's width must be a multiple of ", panel_columns);
    layer.down = arguments.gemm(l.down, tokens, features, l.intermediate_features);
  }
  if (l.experts > 0) take_experts(layer, arguments, l, s, tokens, features);
  layer.attention_norm = arguments.norm(l.attention_norm, s.attention_norm_eps, features);
  layer.ffn_norm = arguments.norm(l.ffn_norm, s.ffn_norm_eps, features);
  layer.ffn_sub_norm = arguments.norm(l.ffn_sub_norm, s.ffn_sub_norm_eps, l.intermediate_features);
  layer.attention_end.post = arguments.norm(l.attention_post_norm, s.attention_post_norm_eps, features);
  layer.attention_end.out = arguments.norm(l.attention_out_norm, s.attention_out_norm_eps, features);
  layer.ffn_end.post = arguments.norm(l.ffn_post_norm, s.ffn_post_norm_eps, features);
  layer.ffn_end.out = arguments.norm(l.ffn_out_norm, s.ffn_out_norm_eps, features);
  layer.attention_end.scale = layer.ffn_end.scale = static_cast<float>(s.residual_scale);
  layer.shares_keys = l.shares_keys != 0;
  if (l.per_layer_features > 0) {
    check_activation(l.per_layer_activation);
    layer.per_layer_gate = arguments.gemm(l.per_layer_gate, tokens, l.per_layer_features, features);
    layer.per_layer_gate.activation = static_cast<Activation>(l.per_layer_activation);
    layer.per_layer_output = arguments.gemm(l.per_layer_output, tokens, features, l.per_layer_features);
    layer.per_layer_end.post = arguments.norm(l.per_layer_post_norm, s.per_layer_post_norm_eps, features);
  }
  (l.per_layer_features > 0 ? layer.per_layer_end : layer.ffn_end).factor = static_cast<float>(s.output_scale);
  STD_TORCH_CHECK(layer.feeds() || (l.per_layer_features <= 0 && s.output_scale == 1.0),
                  "hf_cpu_accel::decoder_layers: an input of its own and a factor need an FFN or experts");
  layer.parallel = l.parallel != 0;
  STD_TORCH_CHECK(!layer.parallel || layer.feeds(), "hf_cpu_accel::decoder_layers: a parallel layer needs an FFN or experts");
  layer.crosses = l.cross_heads > 0;
  if (layer.crosses) {
    STD_TORCH_CHECK(l.cross_kv_heads >= 1 && l.cross_heads <= INT32_MAX && l.cross_heads % l.cross_kv_heads == 0 && l.cross_head_dim >= 1 &&
                        l.cross_head_dim <= INT32_MAX && l.cross_value_dim >= 1 && l.cross_value_dim <= INT32_MAX,
                    "hf_cpu_accel::decoder_layers: cross_heads must be a multiple of cross_kv_heads");
    layer.cross_query = arguments.gemm(l.cross_query, tokens, l.cross_heads * l.cross_head_dim, features);
    layer.cross_output = arguments.gemm(l.cross_output, tokens, features, l.cross_heads * l.cross_value_dim);
    layer.cross_norm = arguments.norm(l.cross_norm, s.cross_norm_eps, features);
    layer.cross_end.out = arguments.norm(l.cross_out_norm, s.cross_out_norm_eps, features);
    layer.cross_end.scale = static_cast<float>(s.residual_scale);
  }
  layer.heads = token_heads_of(arguments, l, s);
  return layer;
}

// A layer's keys or values [batch, kv_heads, capacity, features] as the cache's memory.
inline Heads cache_of(const Tensor& t, const char* name, int64_t batch, int64_t kv_heads, int64_t positions, int64_t features) {
  const HeadType type = head_type(t, decoder_op, name);
  const int64_t width = width_of(type, features);
  STD_TORCH_CHECK(t.dim() == 4 && t.size(0) >= batch && t.size(1) == kv_heads && t.size(2) >= positions && t.size(3) == width &&
                      (width == 1 || t.stride(3) == 1),
                  "hf_cpu_accel::decoder_layers: ", name, " must be [at least ", batch, ", ", kv_heads, ", at least ", positions, ", ",
                  width, "], with a dense last dimension");
  return {t.mutable_data_ptr(), t.stride(0), t.stride(1), t.stride(2), type};
}

// What a layer is given of its own.
inline PerLayerInput per_layer_input_of(const LayerLayout& l, const std::vector<Tensor>& inputs, int64_t batch, int64_t q_len) {
  STD_TORCH_CHECK(0 <= l.per_layer_input && l.per_layer_input < static_cast<int64_t>(inputs.size()),
                  "hf_cpu_accel::decoder_layers: per_layer_inputs has no tensor ", l.per_layer_input);
  const Tensor& t = inputs[static_cast<size_t>(l.per_layer_input)];
  check_floating(t, decoder_op, "per_layer_inputs");
  STD_TORCH_CHECK(t.dim() == 3 && t.size(0) == batch && t.size(1) == q_len && t.size(2) == l.per_layer_features &&
                      (t.size(2) == 1 || t.stride(2) == 1),
                  "hf_cpu_accel::decoder_layers: per_layer_inputs must be [", batch, ", ", q_len, ", ", l.per_layer_features, "], dense");
  return {t.const_data_ptr(), is_bf16(t), t.stride(0), t.stride(1)};
}

// The number of the tables that this layer uses among those of the call.
inline int64_t tables_of(std::vector<RotaryTables>& tables, const LayerLayout& l, const std::vector<Tensor>& rotary, int64_t batch,
                         int64_t q_len) {
  if (l.rotary_dim == 0) return -1;
  STD_TORCH_CHECK(l.rotary >= 0 && l.rotary < static_cast<int64_t>(rotary.size() / 2), "hf_cpu_accel::decoder_layers: rotary has no table ",
                  l.rotary);
  RotaryTables t;
  t.half = l.rotary_dim / 2;
  const auto read = [&](const Tensor& table, const void*& data, int64_t (&strides)[2]) {
    check_floating(table, decoder_op, "rotary");
    STD_TORCH_CHECK(table.dim() == 3 && (table.size(0) == 1 || table.size(0) == batch) && table.size(1) == q_len &&
                        (table.size(2) == l.rotary_dim || table.size(2) == t.half) && (table.size(2) == 1 || table.stride(2) == 1),
                    "hf_cpu_accel::decoder_layers: rotary tables must be [1 or ", batch, ", ", q_len, ", ", l.rotary_dim,
                    " or half of it], dense");
    data = table.const_data_ptr();
    strides[0] = table.size(0) == 1 ? 0 : table.stride(0), strides[1] = table.stride(1);
    t.step = l.rotary_interleaved && table.size(2) == l.rotary_dim ? 2 : 1;
  };
  const Tensor &cos = rotary[static_cast<size_t>(2 * l.rotary)], &sin = rotary[static_cast<size_t>(2 * l.rotary + 1)];
  STD_TORCH_CHECK(cos.scalar_type() == sin.scalar_type() && sizes_of(cos) == sizes_of(sin),
                  "hf_cpu_accel::decoder_layers: cos and sin must be alike");
  read(cos, t.cos, t.cos_strides), read(sin, t.sin, t.sin_strides);
  t.bf16 = is_bf16(cos);
  for (size_t i = 0; i < tables.size(); ++i)
    if (tables[i].cos == t.cos && tables[i].half == t.half && tables[i].step == t.step) return static_cast<int64_t>(i);
  tables.push_back(t);
  return static_cast<int64_t>(tables.size()) - 1;
}

// int32 with a dense last dimension.
inline const int32_t* indices_of(const Tensor& t, const char* name, int64_t batch, int64_t columns) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Int && t.is_cpu() && t.dim() == (columns < 0 ? 1 : 2) && t.size(0) == batch &&
                      (columns < 0 || t.size(1) >= columns) && (t.size(t.dim() - 1) <= 1 || t.stride(t.dim() - 1) == 1),
                  "hf_cpu_accel::decoder_layers: ", name, " must be int32 [", batch, columns < 0 ? "]" : ", at least the past]", ", dense");
  return static_cast<const int32_t*>(t.const_data_ptr());
}

}  // namespace hfca
