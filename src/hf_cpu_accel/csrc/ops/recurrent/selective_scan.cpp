// causal_convolution and selective_scan, between and behind which Mamba has projections: schemas, checks, calls.
#include "arguments.h"

namespace hfca {

Tensor causal_convolution(const Tensor& input, const Tensor& conv_weight, const OptionalTensor& conv_bias, const OptionalTensor& tokens,
                          const Tensor& conv_state) {
  constexpr const char* op = "causal_convolution";
  check_sequence(input, op, "input");
  const int64_t channels = input.size(2), batch = input.size(0), length = input.size(1);
  CausalConv conv = conv_of(input, channels, conv_weight, conv_bias, conv_state, op);
  if (tokens) conv.tokens = tokens_of(*tokens, batch, length, op);
  Tensor output = empty_of({batch, length, channels}, ScalarType::Float, static_cast<int64_t>(sizeof(float)));
  if (output.numel() == 0) return output;
  Tensor keep = input;
  conv.input = as_rows(input, keep), conv.silu = true, conv.output = static_cast<float*>(output.mutable_data_ptr());
  const RecurrentKernels& kernels = dispatch().kernels.recurrent;
  run_team(team_size(static_cast<double>(batch * length * channels * (conv.taps + 4))), [&](Team& team) {
    Workspace own(Workspace::size_of<float>(conv.buffer()));
    float* buffer = own.take<float>(conv.buffer());
    const CausalConv mine = conv;  // not on the calling thread's stack: see gemm/driver.h
    team.each(mine.pieces(), [&](int64_t begin, int64_t end) { kernels.causal_conv(mine, begin, end, buffer); });
  });
  return output;
}

Tensor selective_scan(const Tensor& x, const Tensor& dt, const Tensor& B, const Tensor& C, const Tensor& gate, const Tensor& A_log,
                      const Tensor& D, const Tensor& state) {
  constexpr const char* op = "selective_scan";
  check_sequence(x, op, "x");
  STD_TORCH_CHECK(state.dim() == 3 && state.size(2) >= 1, "hf_cpu_accel::", op, ": state must be [batch, channels, state features]");
  SelectiveScan scan;
  scan.batch = x.size(0), scan.length = x.size(1), scan.channels = x.size(2), scan.state_dim = state.size(2);
  scan.state = static_cast<float*>(state_of(state, {scan.batch, scan.channels, scan.state_dim}, false, op, "state"));
  Tensor keep_x = x, keep_dt = x, keep_B = x, keep_C = x, keep_gate = x;
  scan.x = rows_of(x, x, scan.channels, keep_x, op, "x"), scan.dt = rows_of(dt, x, scan.channels, keep_dt, op, "dt");
  scan.B = rows_of(B, x, scan.state_dim, keep_B, op, "B"), scan.C = rows_of(C, x, scan.state_dim, keep_C, op, "C");
  scan.gate = rows_of(gate, x, scan.channels, keep_gate, op, "gate");
  check_floating(A_log, op, "A_log");
  STD_TORCH_CHECK(sizes_of(A_log) == (std::vector<int64_t>{scan.channels, scan.state_dim}) && A_log.is_contiguous(), "hf_cpu_accel::", op,
                  ": A_log must be contiguous [", scan.channels, ", ", scan.state_dim, "]");
  scan.A_log = {A_log.mutable_data_ptr(), is_bf16(A_log)}, scan.D = as_vector(D, scan.channels, op, "D");
  Tensor output = empty_of(gate, {scan.batch, scan.length, scan.channels});
  if (output.numel() == 0) return output;
  scan.output = {output.mutable_data_ptr(), scan.channels, is_bf16(output)};
  const RecurrentKernels& kernels = dispatch().kernels.recurrent;
  constexpr double exponential = 8.0;  // multiply-adds that one takes, about
  const double work = exponential * static_cast<double>(scan.batch * scan.length * scan.channels * scan.state_dim);
  run_team(team_size(work), [&](Team& team) {
    Workspace own(Workspace::size_of<float>(scan.buffer()));
    float* buffer = own.take<float>(scan.buffer());
    const SelectiveScan mine = scan;  // not on the calling thread's stack: see gemm/driver.h
    team.each(mine.pieces(), [&](int64_t begin, int64_t end) { kernels.selective_scan(mine, begin, end, buffer); });
  });
  return output;
}

}  // namespace hfca

HFCA_OP(causal_convolution, "(Tensor input, Tensor conv_weight, Tensor? conv_bias, Tensor? tokens, Tensor(a!) conv_state) -> Tensor")

HFCA_OP(selective_scan, "(Tensor x, Tensor dt, Tensor B, Tensor C, Tensor gate, Tensor A_log, Tensor D, Tensor(a!) state) -> Tensor")
