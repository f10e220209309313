// The enumerations and structs whose numbers Python and the kernels share. `python -m tests.abi` writes this file
// from src/hf_cpu_accel/abi.py: edit that, run the command, and rebuild the kernels. Plain data, as in gemm/gemm.h.
#pragma once
#include <cstddef>
#include <cstdint>

// clang-format off
namespace hfca {

constexpr int64_t current_abi = 0xf9ce1577ea7e;

// int8_weight: the values of int8, with input in twice as many bits. int4: see gemm/int4.h; affine: gemm/affine.h.
// int8_image: of convolutions; the input becomes bytes by image, or is bytes already (convolution/quantize.h), in runs.
// float32_rows: not packed, see gemm/float_rows.h.
enum class WeightKind : int { float32 = 0, bfloat16 = 1, int8 = 2, int8_weight = 3, int4 = 4, int8_image = 5, affine4 = 6, affine8 = 7, float32_rows = 8 };
constexpr int weight_kinds = 9;

// sigmoid and hardsigmoid: of pixels (convolution/pointwise.h), not of products.
enum class Activation : int { none = 0, gelu = 1, gelu_tanh = 2, relu = 3, silu = 4, quick_gelu = 5, tanh = 6, relu2 = 7, relu6 = 8, hardswish = 9, leaky_relu = 10, leaky_relu_tenth = 11, sigmoid = 12, hardsigmoid = 13 };
constexpr int activations = 12;
constexpr int pointwise_activations = 14;
constexpr const char* activation_names[] = {"none", "gelu", "gelu_tanh", "relu", "silu", "quick_gelu", "tanh", "relu2", "relu6", "hardswish", "leaky_relu", "leaky_relu_tenth", "sigmoid", "hardsigmoid"};

enum class NormKind : int { none = 0, layer_norm = 1, rms_norm = 2 };
constexpr int norm_kinds = 3;

enum class NormScope : int { head = 0, head_with_its_own_weights = 1, all_heads = 2 };
constexpr int norm_scopes = 3;

// none: no gate.
enum class GateActivation : int { none = 0, sigmoid = 1, softplus = 2 };
constexpr int gate_activations = 3;

enum class Scoring : int { softmax = 0, sigmoid = 1 };
constexpr int scorings = 2;

enum class RecurrenceKind : int { none = 0, short_convolution = 1, gated_delta_net = 2, state_space = 3, selective_scan = 4 };
constexpr int recurrence_kinds = 5;

// What a step computes from its source.
enum class StepKind : int { convolution = 0, max_pooling = 1, grouped = 2, mean = 3, sum = 4, product = 5, channels = 6, affine = 7, average_pooling = 8, average_pooling_within = 9 };
constexpr int step_kinds = 10;

enum class Reduce : int { sum = 0, mean = 1, min = 2, max = 3 };
constexpr const char* reduce_names[] = {"sum", "mean", "min", "max"};

// var is that of all the messages of a row (divided by their number); std is its root, and 0 where var is at most 1e-5.
enum class Aggregate : int { sum = 0, mean = 1, min = 2, max = 3, var = 4, std = 5 };
constexpr int aggregates = 6;
constexpr const char* aggregate_names[] = {"sum", "mean", "min", "max", "var", "std"};

struct ProjectionLayout {
  int64_t weight;
  int64_t scale;
  int64_t bias;
};
static_assert(sizeof(ProjectionLayout) == 3 * sizeof(int64_t));
static_assert(offsetof(ProjectionLayout, weight) == 0 * sizeof(int64_t));
static_assert(offsetof(ProjectionLayout, scale) == 1 * sizeof(int64_t));
static_assert(offsetof(ProjectionLayout, bias) == 2 * sizeof(int64_t));

struct NormLayout {
  int64_t kind;
  int64_t weight;
  int64_t bias;
};
static_assert(sizeof(NormLayout) == 3 * sizeof(int64_t));
static_assert(offsetof(NormLayout, kind) == 0 * sizeof(int64_t));
static_assert(offsetof(NormLayout, weight) == 1 * sizeof(int64_t));
static_assert(offsetof(NormLayout, bias) == 2 * sizeof(int64_t));

struct HeadsLayout {
  int64_t first;
  int64_t stride;
  int64_t head_stride;
};
static_assert(sizeof(HeadsLayout) == 3 * sizeof(int64_t));
static_assert(offsetof(HeadsLayout, first) == 0 * sizeof(int64_t));
static_assert(offsetof(HeadsLayout, stride) == 1 * sizeof(int64_t));
static_assert(offsetof(HeadsLayout, head_stride) == 2 * sizeof(int64_t));

struct RecurrenceLayout {
  int64_t kind;
  int64_t channels;
  int64_t taps;
  int64_t conv_weight;
  int64_t conv_bias;
  int64_t conv_input;
  int64_t conv_gate;
  int64_t gate;
  int64_t decay;
  int64_t beta;
  int64_t heads;
  int64_t key_heads;
  int64_t key_dim;
  int64_t value_dim;
  int64_t A_log;
  int64_t dt_bias;
  int64_t D;
  int64_t norm_weight;
  int64_t norm_groups;
  int64_t gate_first;
  ProjectionLayout rest;
  ProjectionLayout selected;
  ProjectionLayout steps;
  int64_t rest_features;
  int64_t selected_features;
  int64_t dt_norm;
  int64_t B_norm;
  int64_t C_norm;
};
static_assert(sizeof(RecurrenceLayout) == 34 * sizeof(int64_t));
static_assert(offsetof(RecurrenceLayout, kind) == 0 * sizeof(int64_t));
static_assert(offsetof(RecurrenceLayout, channels) == 1 * sizeof(int64_t));
static_assert(offsetof(RecurrenceLayout, taps) == 2 * sizeof(int64_t));
static_assert(offsetof(RecurrenceLayout, conv_weight) == 3 * sizeof(int64_t));
static_assert(offsetof(RecurrenceLayout, conv_bias) == 4 * sizeof(int64_t));
static_assert(offsetof(RecurrenceLayout, conv_input) == 5 * sizeof(int64_t));
static_assert(offsetof(RecurrenceLayout, conv_gate) == 6 * sizeof(int64_t));
static_assert(offsetof(RecurrenceLayout, gate) == 7 * sizeof(int64_t));
static_assert(offsetof(RecurrenceLayout, decay) == 8 * sizeof(int64_t));
static_assert(offsetof(RecurrenceLayout, beta) == 9 * sizeof(int64_t));
static_assert(offsetof(RecurrenceLayout, heads) == 10 * sizeof(int64_t));
static_assert(offsetof(RecurrenceLayout, key_heads) == 11 * sizeof(int64_t));
static_assert(offsetof(RecurrenceLayout, key_dim) == 12 * sizeof(int64_t));
static_assert(offsetof(RecurrenceLayout, value_dim) == 13 * sizeof(int64_t));
static_assert(offsetof(RecurrenceLayout, A_log) == 14 * sizeof(int64_t));
static_assert(offsetof(RecurrenceLayout, dt_bias) == 15 * sizeof(int64_t));
static_assert(offsetof(RecurrenceLayout, D) == 16 * sizeof(int64_t));
static_assert(offsetof(RecurrenceLayout, norm_weight) == 17 * sizeof(int64_t));
static_assert(offsetof(RecurrenceLayout, norm_groups) == 18 * sizeof(int64_t));
static_assert(offsetof(RecurrenceLayout, gate_first) == 19 * sizeof(int64_t));
static_assert(offsetof(RecurrenceLayout, rest) == 20 * sizeof(int64_t));
static_assert(offsetof(RecurrenceLayout, selected) == 23 * sizeof(int64_t));
static_assert(offsetof(RecurrenceLayout, steps) == 26 * sizeof(int64_t));
static_assert(offsetof(RecurrenceLayout, rest_features) == 29 * sizeof(int64_t));
static_assert(offsetof(RecurrenceLayout, selected_features) == 30 * sizeof(int64_t));
static_assert(offsetof(RecurrenceLayout, dt_norm) == 31 * sizeof(int64_t));
static_assert(offsetof(RecurrenceLayout, B_norm) == 32 * sizeof(int64_t));
static_assert(offsetof(RecurrenceLayout, C_norm) == 33 * sizeof(int64_t));

struct LayerLayout {
  ProjectionLayout qkv;
  ProjectionLayout output;
  ProjectionLayout cross_query;
  ProjectionLayout cross_output;
  ProjectionLayout up;
  ProjectionLayout down;
  ProjectionLayout router;
  ProjectionLayout experts_up;
  ProjectionLayout experts_down;
  ProjectionLayout per_layer_gate;
  ProjectionLayout per_layer_output;
  NormLayout attention_norm;
  NormLayout attention_post_norm;
  NormLayout attention_out_norm;
  NormLayout cross_norm;
  NormLayout cross_out_norm;
  NormLayout ffn_norm;
  NormLayout ffn_post_norm;
  NormLayout ffn_out_norm;
  NormLayout per_layer_post_norm;
  NormLayout query_norm;
  NormLayout key_norm;
  NormLayout value_norm;
  NormLayout attention_sub_norm;
  NormLayout ffn_sub_norm;
  int64_t query_norm_scope;
  int64_t key_norm_scope;
  int64_t value_norm_scope;
  int64_t attention_sub_norm_scope;
  int64_t sinks;
  int64_t alibi;
  int64_t relative;
  int64_t relative_count;
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;
  int64_t value_dim;
  HeadsLayout query;
  HeadsLayout key;
  HeadsLayout value;
  HeadsLayout gate;
  int64_t gate_dim;
  int64_t gate_activation;
  int64_t cross_heads;
  int64_t cross_kv_heads;
  int64_t cross_head_dim;
  int64_t cross_value_dim;
  int64_t window;
  int64_t rotary;
  int64_t rotary_dim;
  int64_t rotary_interleaved;
  int64_t shares_keys;
  int64_t qkv_features;
  int64_t intermediate_features;
  int64_t gated;
  int64_t activation;
  int64_t parallel;
  int64_t experts;
  int64_t top_k;
  int64_t expert_features;
  int64_t experts_gated;
  int64_t experts_activation;
  int64_t scoring;
  int64_t choice_bias;
  int64_t renormalize;
  int64_t shared_gate;
  int64_t per_layer_input;
  int64_t per_layer_features;
  int64_t per_layer_activation;
  RecurrenceLayout recurrence;
};
static_assert(sizeof(LayerLayout) == 161 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, qkv) == 0 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, output) == 3 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, cross_query) == 6 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, cross_output) == 9 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, up) == 12 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, down) == 15 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, router) == 18 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, experts_up) == 21 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, experts_down) == 24 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, per_layer_gate) == 27 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, per_layer_output) == 30 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, attention_norm) == 33 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, attention_post_norm) == 36 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, attention_out_norm) == 39 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, cross_norm) == 42 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, cross_out_norm) == 45 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, ffn_norm) == 48 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, ffn_post_norm) == 51 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, ffn_out_norm) == 54 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, per_layer_post_norm) == 57 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, query_norm) == 60 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, key_norm) == 63 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, value_norm) == 66 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, attention_sub_norm) == 69 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, ffn_sub_norm) == 72 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, query_norm_scope) == 75 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, key_norm_scope) == 76 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, value_norm_scope) == 77 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, attention_sub_norm_scope) == 78 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, sinks) == 79 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, alibi) == 80 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, relative) == 81 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, relative_count) == 82 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, heads) == 83 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, kv_heads) == 84 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, head_dim) == 85 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, value_dim) == 86 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, query) == 87 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, key) == 90 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, value) == 93 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, gate) == 96 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, gate_dim) == 99 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, gate_activation) == 100 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, cross_heads) == 101 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, cross_kv_heads) == 102 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, cross_head_dim) == 103 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, cross_value_dim) == 104 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, window) == 105 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, rotary) == 106 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, rotary_dim) == 107 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, rotary_interleaved) == 108 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, shares_keys) == 109 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, qkv_features) == 110 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, intermediate_features) == 111 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, gated) == 112 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, activation) == 113 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, parallel) == 114 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, experts) == 115 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, top_k) == 116 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, expert_features) == 117 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, experts_gated) == 118 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, experts_activation) == 119 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, scoring) == 120 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, choice_bias) == 121 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, renormalize) == 122 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, shared_gate) == 123 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, per_layer_input) == 124 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, per_layer_features) == 125 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, per_layer_activation) == 126 * sizeof(int64_t));
static_assert(offsetof(LayerLayout, recurrence) == 127 * sizeof(int64_t));

struct LayerScalars {
  double attention_norm_eps;
  double attention_post_norm_eps;
  double attention_out_norm_eps;
  double cross_norm_eps;
  double cross_out_norm_eps;
  double ffn_norm_eps;
  double ffn_post_norm_eps;
  double ffn_out_norm_eps;
  double per_layer_post_norm_eps;
  double query_norm_eps;
  double key_norm_eps;
  double value_norm_eps;
  double attention_sub_norm_eps;
  double ffn_sub_norm_eps;
  double scale;
  double cross_scale;
  double softcap;
  double residual_scale;
  double output_scale;
  double experts_limit;
  double experts_scale;
  double recurrence_norm_eps;
};
static_assert(sizeof(LayerScalars) == 22 * sizeof(double));
static_assert(offsetof(LayerScalars, attention_norm_eps) == 0 * sizeof(double));
static_assert(offsetof(LayerScalars, attention_post_norm_eps) == 1 * sizeof(double));
static_assert(offsetof(LayerScalars, attention_out_norm_eps) == 2 * sizeof(double));
static_assert(offsetof(LayerScalars, cross_norm_eps) == 3 * sizeof(double));
static_assert(offsetof(LayerScalars, cross_out_norm_eps) == 4 * sizeof(double));
static_assert(offsetof(LayerScalars, ffn_norm_eps) == 5 * sizeof(double));
static_assert(offsetof(LayerScalars, ffn_post_norm_eps) == 6 * sizeof(double));
static_assert(offsetof(LayerScalars, ffn_out_norm_eps) == 7 * sizeof(double));
static_assert(offsetof(LayerScalars, per_layer_post_norm_eps) == 8 * sizeof(double));
static_assert(offsetof(LayerScalars, query_norm_eps) == 9 * sizeof(double));
static_assert(offsetof(LayerScalars, key_norm_eps) == 10 * sizeof(double));
static_assert(offsetof(LayerScalars, value_norm_eps) == 11 * sizeof(double));
static_assert(offsetof(LayerScalars, attention_sub_norm_eps) == 12 * sizeof(double));
static_assert(offsetof(LayerScalars, ffn_sub_norm_eps) == 13 * sizeof(double));
static_assert(offsetof(LayerScalars, scale) == 14 * sizeof(double));
static_assert(offsetof(LayerScalars, cross_scale) == 15 * sizeof(double));
static_assert(offsetof(LayerScalars, softcap) == 16 * sizeof(double));
static_assert(offsetof(LayerScalars, residual_scale) == 17 * sizeof(double));
static_assert(offsetof(LayerScalars, output_scale) == 18 * sizeof(double));
static_assert(offsetof(LayerScalars, experts_limit) == 19 * sizeof(double));
static_assert(offsetof(LayerScalars, experts_scale) == 20 * sizeof(double));
static_assert(offsetof(LayerScalars, recurrence_norm_eps) == 21 * sizeof(double));

struct SidesLayout {
  int64_t rows;
  int64_t columns;
};
static_assert(sizeof(SidesLayout) == 2 * sizeof(int64_t));
static_assert(offsetof(SidesLayout, rows) == 0 * sizeof(int64_t));
static_assert(offsetof(SidesLayout, columns) == 1 * sizeof(int64_t));

struct StepLayout {
  int64_t kind;
  int64_t weight;
  int64_t scale;
  int64_t bias;
  int64_t range;
  int64_t source;
  int64_t residual;
  int64_t out_channels;
  int64_t activation;
  SidesLayout size;
  SidesLayout stride;
  SidesLayout padding;
  SidesLayout dilation;
  SidesLayout more;
};
static_assert(sizeof(StepLayout) == 19 * sizeof(int64_t));
static_assert(offsetof(StepLayout, kind) == 0 * sizeof(int64_t));
static_assert(offsetof(StepLayout, weight) == 1 * sizeof(int64_t));
static_assert(offsetof(StepLayout, scale) == 2 * sizeof(int64_t));
static_assert(offsetof(StepLayout, bias) == 3 * sizeof(int64_t));
static_assert(offsetof(StepLayout, range) == 4 * sizeof(int64_t));
static_assert(offsetof(StepLayout, source) == 5 * sizeof(int64_t));
static_assert(offsetof(StepLayout, residual) == 6 * sizeof(int64_t));
static_assert(offsetof(StepLayout, out_channels) == 7 * sizeof(int64_t));
static_assert(offsetof(StepLayout, activation) == 8 * sizeof(int64_t));
static_assert(offsetof(StepLayout, size) == 9 * sizeof(int64_t));
static_assert(offsetof(StepLayout, stride) == 11 * sizeof(int64_t));
static_assert(offsetof(StepLayout, padding) == 13 * sizeof(int64_t));
static_assert(offsetof(StepLayout, dilation) == 15 * sizeof(int64_t));
static_assert(offsetof(StepLayout, more) == 17 * sizeof(int64_t));

}  // namespace hfca
// clang-format on
