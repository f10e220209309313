// A layer as bind() of ops/decoder/bind.py writes it down: LAYOUT and SCALARS there, in the same order.
#pragma once
#include <cstdint>

namespace hfca {

struct ProjectionLayout {
  int64_t weight, scale, bias;
};

struct NormLayout {
  int64_t kind, weight, bias;
};

struct HeadsLayout {
  int64_t first, stride, head_stride;
};

struct RecurrenceLayout {
  int64_t kind, channels, taps, conv_weight, conv_bias, conv_input, conv_gate, gate, decay, beta;
  int64_t heads, key_heads, key_dim, value_dim, A_log, dt_bias, D, norm_weight, norm_groups, gate_first;
  ProjectionLayout rest, selected, steps;
  int64_t rest_features, selected_features, dt_norm, B_norm, C_norm;
};

struct LayerLayout {
  ProjectionLayout qkv, output, cross_query, cross_output, up, down, router, experts_up, experts_down, per_layer_gate, per_layer_output;
  NormLayout attention_norm, attention_post_norm, attention_out_norm, cross_norm, cross_out_norm, ffn_norm, ffn_post_norm, ffn_out_norm,
      per_layer_post_norm, query_norm, key_norm, value_norm, attention_sub_norm, ffn_sub_norm;
  int64_t query_norm_scope, key_norm_scope, value_norm_scope, attention_sub_norm_scope, sinks, alibi, relative, relative_count;
  int64_t heads, kv_heads, head_dim, value_dim;
  HeadsLayout query, key, value, gate;
  int64_t gate_dim, gate_activation;
  int64_t cross_heads, cross_kv_heads, cross_head_dim, cross_value_dim;
  int64_t window, rotary, rotary_dim, rotary_interleaved, shares_keys;
  int64_t qkv_features, intermediate_features, gated, activation, parallel;
  int64_t experts, top_k, expert_features, experts_gated, experts_activation, scoring, choice_bias, renormalize, shared_gate;
  int64_t per_layer_input, per_layer_features, per_layer_activation;
  RecurrenceLayout recurrence;
};

struct LayerScalars {
  double attention_norm_eps, attention_post_norm_eps, attention_out_norm_eps, cross_norm_eps, cross_out_norm_eps;
  double ffn_norm_eps, ffn_post_norm_eps, ffn_out_norm_eps, per_layer_post_norm_eps;
  double query_norm_eps, key_norm_eps, value_norm_eps, attention_sub_norm_eps, ffn_sub_norm_eps, scale, cross_scale, softcap;
  double residual_scale, output_scale;
  double experts_limit, experts_scale, recurrence_norm_eps;
};

}  // namespace hfca
