// state_space: schema, checks, call.
#include "arguments.h"

namespace hfca {

Tensor state_space(const Tensor& projected, const Tensor& conv_weight, const OptionalTensor& conv_bias, const Tensor& A_log,
                   const Tensor& D, const Tensor& dt_bias, const OptionalTensor& norm_weight, double eps, int64_t norm_groups,
                   bool gate_first, double least_dt, double most_dt, const OptionalTensor& tokens, const Tensor& conv_state,
                   const Tensor& state) {
  constexpr const char* op = "state_space";
  check_sequence(projected, op, "projected");
  STD_TORCH_CHECK(state.dim() == 4 && conv_state.dim() == 3 && state.size(2) >= 1 && state.size(3) >= 1, "hf_cpu_accel::", op,
                  ": state must be [batch, heads, head features, state features] and conv_state [batch, channels, taps]");
  StateSpace space;
  space.batch = projected.size(0), space.length = projected.size(1), space.channels = conv_state.size(1);
  space.heads = state.size(1), space.head_dim = state.size(2), space.state_dim = state.size(3);
  const int64_t columns = space.heads * space.head_dim, rows = space.batch * space.length;
  space.groups = (space.channels - columns) / (2 * space.state_dim);
  STD_TORCH_CHECK(space.heads >= 1 && space.groups >= 1 && space.channels == columns + 2 * space.groups * space.state_dim &&
                      space.heads % space.groups == 0,
                  "hf_cpu_accel::", op, ": conv_state of ", space.channels, " channels does not hold ", space.heads, " heads of ",
                  space.head_dim, " features and groups of two times ", space.state_dim);
  STD_TORCH_CHECK(norm_groups >= 1 && columns % norm_groups == 0, "hf_cpu_accel::", op, ": norm_groups must divide ", columns);
  space.state = static_cast<float*>(state_of(state, {space.batch, space.heads, space.head_dim, space.state_dim}, false, op, "state"));
  STD_TORCH_CHECK(least_dt >= 0.0 && least_dt <= most_dt, "hf_cpu_accel::", op, ": least_dt must be from 0 to most_dt, and they are ",
                  least_dt, " and ", most_dt);
  space.least_dt = static_cast<float>(least_dt), space.most_dt = static_cast<float>(most_dt);
  CausalConv conv = conv_of(projected, space.channels, conv_weight, conv_bias, conv_state, op);
  Tensor keep = projected;
  const Matrix all = rows_of(projected, projected, columns + space.channels + space.heads, keep, op, "projected");
  const auto part = [&](int64_t column) {
    return Matrix{static_cast<char*>(all.data) + column * all.element_bytes(), all.stride, all.bf16};
  };
  conv.input = part(columns), conv.silu = true, space.dt = part(columns + space.channels);
  if (tokens) conv.tokens = tokens_of(*tokens, space.batch, space.length, op);
  space.A_log = as_vector(A_log, space.heads, op, "A_log"), space.D = as_vector(D, space.heads, op, "D");
  space.dt_bias = as_vector(dt_bias, space.heads, op, "dt_bias");
  GatedNorm norm;
  norm.gate = part(0), norm.weight = as_vector(norm_weight, columns, op, "norm_weight"), norm.weight_per_group = true;
  norm.eps = static_cast<float>(eps), norm.gate_first = gate_first, norm.stride = space.channels;
  norm.columns = columns / norm_groups, norm.groups = norm_groups, norm.rows = rows;
  Tensor output = empty_of(projected, {space.batch, space.length, columns});
  if (output.numel() == 0) return output;
  norm.output = {output.mutable_data_ptr(), columns, is_bf16(output)};
  Workspace shared(Workspace::size_of<float>(rows * space.channels));
  conv.output = space.mixed = shared.take<float>(rows * space.channels);
  norm.input = space.mixed;
  const RecurrentKernels& kernels = dispatch().kernels.recurrent;
  const int64_t size = std::max(conv.buffer(), norm.columns);
  run_team(team_size(3.0 * static_cast<double>(rows * columns * space.state_dim)), [&](Team& team) {
    Workspace own(Workspace::size_of<float>(size));
    float* buffer = own.take<float>(size);
    const CausalConv my_conv = conv;  // not on the calling thread's stack: see gemm/driver.h
    const StateSpace mine = space;
    const GatedNorm my_norm = norm;
    team.each(my_conv.pieces(), [&](int64_t begin, int64_t end) { kernels.causal_conv(my_conv, begin, end, buffer); });
    team.each(mine.pieces(), [&](int64_t begin, int64_t end) { kernels.state_space(mine, begin, end); });
    team.each(my_norm.rows * my_norm.groups, [&](int64_t begin, int64_t end) { kernels.gated_norm(my_norm, begin, end, buffer); });
  });
  return output;
}

}  // namespace hfca

HFCA_OP(
    state_space,
    "(Tensor projected, Tensor conv_weight, Tensor? conv_bias, Tensor A_log, Tensor D, Tensor dt_bias, Tensor? norm_weight, float eps, "
    "int norm_groups, bool gate_first, float least_dt, float most_dt, Tensor? tokens, Tensor(a!) conv_state, Tensor(b!) state) -> Tensor")
