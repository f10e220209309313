// From the op's arguments to a layer's recurrence.
#pragma once
#include "../ops/recurrent/arguments.h"
#include "arguments.h"

namespace hfca {

// What a selective scan has besides its convolution.
inline void take_scan(Recurrence& r, const LayerArguments& arguments, const RecurrenceLayout& l, double eps, int64_t columns,
                      const Tensor& state) {
  const int64_t tokens = r.conv.batch * r.conv.length, rank = l.selected_features - 2 * l.key_dim;
  STD_TORCH_CHECK(columns == l.channels && l.rest_features == 0 && 1 <= l.key_dim && l.key_dim <= INT32_MAX &&
                      l.selected_features <= INT32_MAX && rank >= 1,
                  "hf_cpu_accel::decoder_layers: the sizes of a selective scan do not fit one another");
  r.selected = arguments.gemm(l.selected, tokens, l.selected_features, l.channels);
  r.steps = arguments.gemm(l.steps, tokens, l.channels, rank);
  const int64_t weights[3] = {l.dt_norm, l.B_norm, l.C_norm}, widths[3] = {rank, l.key_dim, l.key_dim};
  for (int i = 0; i < 3; ++i) {
    STD_TORCH_CHECK((weights[i] < 0) == (l.dt_norm < 0), "hf_cpu_accel::decoder_layers: a selective scan has three norms or none");
    const NormKind kind = weights[i] < 0 ? NormKind::none : NormKind::rms_norm;
    r.selected_norms[i] = arguments.norm({static_cast<int64_t>(kind), weights[i], -1}, eps, widths[i]);
  }
  STD_TORCH_CHECK(l.A_log >= 0 && l.D >= 0, "hf_cpu_accel::decoder_layers: a selective scan needs A_log and D");
  SelectiveScan& scan = r.scan;
  scan.batch = r.conv.batch, scan.length = r.conv.length, scan.channels = l.channels, scan.state_dim = l.key_dim;
  scan.A_log = arguments.array(l.A_log, times_features(l.channels, l.key_dim)), scan.D = arguments.array(l.D, l.channels);
  scan.state = static_cast<float*>(state_of(state, {scan.batch, l.channels, l.key_dim}, false, decoder_op, "values"));
}

// Without its inputs and outputs. `conv_state` and `state` stand where other layers have keys and values.
inline Recurrence recurrence_of(const LayerArguments& arguments, const LayerLayout& layout, const LayerScalars& s, int64_t batch,
                                int64_t length, int64_t features, const Tensor& conv_state, const Tensor& state) {
  const RecurrenceLayout& l = layout.recurrence;
  const auto is_size = [](int64_t size) { return 1 <= size && size <= INT32_MAX; };
  STD_TORCH_CHECK(0 < l.kind && l.kind < recurrence_kinds, "hf_cpu_accel::decoder_layers: layout names a recurrence of no kind");
  STD_TORCH_CHECK(is_size(l.channels) && is_size(l.taps), "hf_cpu_accel::decoder_layers: a recurrence needs channels and taps");
  Recurrence r;
  r.kind = static_cast<RecurrenceKind>(l.kind);
  if (l.rest_features > 0) r.rest = arguments.gemm(l.rest, batch * length, l.rest_features, features);
  CausalConv& conv = r.conv;
  conv.batch = batch, conv.length = length, conv.channels = l.channels, conv.taps = l.taps;
  STD_TORCH_CHECK(l.conv_weight >= 0, "hf_cpu_accel::decoder_layers: a recurrence needs the weight of its convolution");
  conv.weight = arguments.array(l.conv_weight, l.channels * l.taps), conv.bias = arguments.array(l.conv_bias, l.channels);
  conv.state = {state_of(conv_state, {batch, l.channels, l.taps}, true, decoder_op, "keys"), is_bf16(conv_state)};
  conv.silu = r.kind != RecurrenceKind::short_convolution;
  const int64_t columns = layout.heads * layout.value_dim;
  r.rows.columns = columns;
  if (!conv.silu) {
    STD_TORCH_CHECK(columns == l.channels, "hf_cpu_accel::decoder_layers: a short convolution gives as many features as it has channels");
    return r;
  }
  if (r.kind == RecurrenceKind::selective_scan) {
    take_scan(r, arguments, l, s.recurrence_norm_eps, columns, state);
    return r;
  }
  STD_TORCH_CHECK(is_size(l.heads) && is_size(l.key_heads) && is_size(l.key_dim) && is_size(l.value_dim) && l.heads % l.key_heads == 0 &&
                      l.heads * l.value_dim == columns && times_features(2 * l.key_heads, l.key_dim) == l.channels - columns,
                  "hf_cpu_accel::decoder_layers: a recurrence's heads do not fit its channels");
  STD_TORCH_CHECK(l.A_log >= 0 && l.dt_bias >= 0, "hf_cpu_accel::decoder_layers: a recurrence needs A_log and dt_bias");
  const Array A_log = arguments.array(l.A_log, l.heads), dt_bias = arguments.array(l.dt_bias, l.heads);
  GatedNorm& norm = r.norm;
  norm.eps = static_cast<float>(s.recurrence_norm_eps), norm.stride = l.channels, norm.rows = batch * length;
  if (r.kind == RecurrenceKind::gated_delta_net) {
    DeltaRule& d = r.delta;
    d.batch = batch, d.length = length, d.channels = l.channels, d.heads = l.heads, d.key_heads = l.key_heads;
    d.key_dim = l.key_dim, d.value_dim = l.value_dim, d.A_log = A_log, d.dt_bias = dt_bias;
    d.state = static_cast<float*>(state_of(state, {batch, l.heads, l.key_dim, l.value_dim}, false, decoder_op, "values"));
    norm.weight = arguments.array(l.norm_weight, l.value_dim), norm.columns = l.value_dim, norm.groups = l.heads;
    return r;
  }
  StateSpace& space = r.space;
  space.batch = batch, space.length = length, space.channels = l.channels, space.heads = l.heads, space.groups = l.key_heads;
  space.head_dim = l.value_dim, space.state_dim = l.key_dim, space.A_log = A_log, space.dt_bias = dt_bias;
  STD_TORCH_CHECK(l.D >= 0, "hf_cpu_accel::decoder_layers: a state space needs D");
  space.D = arguments.array(l.D, l.heads);
  space.state = static_cast<float*>(state_of(state, {batch, l.heads, l.value_dim, l.key_dim}, false, decoder_op, "values"));
  STD_TORCH_CHECK(is_size(l.norm_groups) && columns % l.norm_groups == 0,
                  "hf_cpu_accel::decoder_layers: norm_groups must divide the features of a recurrence");
  norm.weight = arguments.array(l.norm_weight, columns), norm.weight_per_group = true, norm.gate_first = l.gate_first != 0;
  norm.columns = columns / l.norm_groups, norm.groups = l.norm_groups;
  return r;
}

// Its inputs are in what its products give.
inline void connect(Recurrence& r, const LayerLayout& layout, const DecoderCall& call) {
  const RecurrenceLayout& l = layout.recurrence;
  const int64_t features = layout.qkv_features, columns = layout.heads * layout.value_dim;
  // A place is a column of the first product or, counted on, of the second.
  const auto part = [&](int64_t place, int64_t width) {
    const bool first = 0 <= place && place <= features - width, second = features <= place && place <= features + l.rest_features - width;
    STD_TORCH_CHECK(first || second, "hf_cpu_accel::decoder_layers: a recurrence's inputs lie outside of its projections");
    return first ? Matrix{call.merged + place, features} : Matrix{call.rest + place - features, l.rest_features};
  };
  r.rest.write_to({call.rest, l.rest_features});
  r.conv.input = part(l.conv_input, l.channels), r.conv.output = call.query;
  const Matrix gate = part(l.gate, columns);
  if (r.kind == RecurrenceKind::short_convolution) {
    r.conv.gate = part(l.conv_gate, l.channels);
    r.rows.input = call.query, r.rows.gate = gate;
    return;
  }
  if (r.kind == RecurrenceKind::selective_scan) {
    const int64_t width = l.selected_features, rank = width - 2 * l.key_dim;
    r.selected.write_to({call.rest, width});
    r.parts[0] = {call.rest, width}, r.parts[1] = {call.rest + rank, width}, r.parts[2] = {call.rest + rank + l.key_dim, width};
    r.steps.write_to(r.conv.input);  // which nothing reads any more
    r.scan.x = {call.query, l.channels}, r.scan.dt = r.conv.input, r.scan.B = r.parts[1], r.scan.C = r.parts[2];
    r.scan.gate = gate, r.scan.output = {call.context, columns};
    return;
  }
  r.norm.gate = gate, r.norm.input = call.query;
  if (r.kind == RecurrenceKind::state_space) {
    r.space.mixed = call.query, r.space.dt = part(l.decay, l.heads);
    return;
  }
  r.delta.mixed = call.query, r.delta.decay = part(l.decay, l.heads), r.delta.beta = part(l.beta, l.heads);
  r.norm.input += l.channels - columns;
}

}  // namespace hfca
