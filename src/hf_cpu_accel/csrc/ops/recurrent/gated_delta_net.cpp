// gated_delta_net: schema, checks, call.
#include "arguments.h"

namespace hfca {

Tensor gated_delta_net(const Tensor& query_key_value, const Tensor& gate, const Tensor& decay, const Tensor& beta,
                       const Tensor& conv_weight, const OptionalTensor& conv_bias, const Tensor& A_log, const Tensor& dt_bias,
                       const Tensor& norm_weight, double eps, const Tensor& conv_state, const Tensor& state) {
  constexpr const char* op = "gated_delta_net";
  check_sequence(query_key_value, op, "query_key_value");
  STD_TORCH_CHECK(state.dim() == 4 && state.size(2) >= 1 && state.size(3) >= 1, "hf_cpu_accel::", op,
                  ": state must be [batch, heads, key features, value features]");
  DeltaRule rule;
  rule.batch = query_key_value.size(0), rule.length = query_key_value.size(1), rule.channels = query_key_value.size(2);
  rule.heads = state.size(1), rule.key_dim = state.size(2), rule.value_dim = state.size(3);
  const int64_t columns = rule.heads * rule.value_dim, rows = rule.batch * rule.length, keys = rule.channels - columns;
  rule.key_heads = keys / (2 * rule.key_dim);
  STD_TORCH_CHECK(rule.heads >= 1 && rule.key_heads >= 1 && keys == 2 * rule.key_heads * rule.key_dim && rule.heads % rule.key_heads == 0,
                  "hf_cpu_accel::", op, ": query_key_value of ", rule.channels, " features does not hold queries and keys of ",
                  rule.key_dim, " features and the values of ", rule.heads, " heads of ", rule.value_dim);
  rule.state = static_cast<float*>(state_of(state, {rule.batch, rule.heads, rule.key_dim, rule.value_dim}, false, op, "state"));
  CausalConv conv = conv_of(query_key_value, rule.channels, conv_weight, conv_bias, conv_state, op);
  Tensor keep_mixed = gate, keep_gate = gate, keep_decay = gate, keep_beta = gate;
  conv.input = rows_of(query_key_value, query_key_value, rule.channels, keep_mixed, op, "query_key_value"), conv.silu = true;
  rule.decay = rows_of(decay, query_key_value, rule.heads, keep_decay, op, "decay");
  rule.beta = rows_of(beta, query_key_value, rule.heads, keep_beta, op, "beta");
  rule.A_log = as_vector(A_log, rule.heads, op, "A_log"), rule.dt_bias = as_vector(dt_bias, rule.heads, op, "dt_bias");
  GatedNorm norm;
  norm.gate = rows_of(gate, query_key_value, columns, keep_gate, op, "gate");
  norm.weight = as_vector(norm_weight, rule.value_dim, op, "norm_weight"), norm.eps = static_cast<float>(eps);
  norm.stride = rule.channels, norm.columns = rule.value_dim, norm.groups = rule.heads, norm.rows = rows;
  Tensor output = empty_of(query_key_value, {rule.batch, rule.length, columns});
  if (output.numel() == 0) return output;
  norm.output = {output.mutable_data_ptr(), columns, is_bf16(output)};
  Workspace shared(Workspace::size_of<float>(rows * rule.channels));
  conv.output = rule.mixed = shared.take<float>(rows * rule.channels);
  norm.input = rule.mixed + keys;
  const RecurrentKernels& kernels = dispatch().kernels.recurrent;
  const int64_t size = std::max({conv.buffer(), kernels.delta_rule_buffer(rule), norm.columns});
  run_team(team_size(3.0 * static_cast<double>(rows * columns * rule.key_dim)), [&](Team& team) {
    Workspace own(Workspace::size_of<float>(size));
    float* buffer = own.take<float>(size);
    const CausalConv my_conv = conv;  // not on the calling thread's stack: see gemm/driver.h
    const DeltaRule mine = rule;
    const GatedNorm my_norm = norm;
    team.each(my_conv.pieces(), [&](int64_t begin, int64_t end) { kernels.causal_conv(my_conv, begin, end, buffer); });
    team.each(mine.pieces(), [&](int64_t begin, int64_t end) { kernels.delta_rule(mine, begin, end, buffer); });
    team.each(my_norm.rows * my_norm.groups, [&](int64_t begin, int64_t end) { kernels.gated_norm(my_norm, begin, end, buffer); });
  });
  return output;
}

}  // namespace hfca

HFCA_OP(
    gated_delta_net,
    "(Tensor query_key_value, Tensor gate, Tensor decay, Tensor beta, Tensor conv_weight, Tensor? conv_bias, Tensor A_log, Tensor dt_bias, "
    "Tensor norm_weight, float eps, Tensor(a!) conv_state, Tensor(b!) state) -> Tensor")
