// short_convolution: schema, checks, call.
#include "arguments.h"

namespace hfca {

Tensor short_convolution(const Tensor& input, const Tensor& conv_weight, const OptionalTensor& conv_bias, const Tensor& conv_state) {
  constexpr const char* op = "short_convolution";
  check_sequence(input, op, "input");
  STD_TORCH_CHECK(input.size(2) % 3 == 0, "hf_cpu_accel::", op, ": input must be [batch, length, 3 * channels]");
  const int64_t channels = input.size(2) / 3, rows = input.size(0) * input.size(1);
  CausalConv conv = conv_of(input, channels, conv_weight, conv_bias, conv_state, op);
  Tensor output = empty_of(input, {input.size(0), input.size(1), channels});
  if (output.numel() == 0) return output;
  Tensor keep = input;
  const Matrix parts = as_rows(input, keep);
  const auto part = [&](int64_t number) {
    return Matrix{static_cast<char*>(parts.data) + number * channels * parts.element_bytes(), parts.stride, parts.bf16};
  };
  Workspace shared(Workspace::size_of<float>(rows * channels));
  conv.gate = part(0), conv.input = part(2), conv.output = shared.take<float>(rows * channels);
  const GatedRows gated{conv.output, part(1), {output.mutable_data_ptr(), channels, is_bf16(output)}, channels};
  const RecurrentKernels& kernels = dispatch().kernels.recurrent;
  run_team(team_size(static_cast<double>(rows * channels * (conv.taps + 4))), [&](Team& team) {
    Workspace own(Workspace::size_of<float>(conv.buffer()));
    float* buffer = own.take<float>(conv.buffer());
    const CausalConv mine = conv;  // not on the calling thread's stack: see gemm/driver.h
    const GatedRows my_rows = gated;
    team.each(mine.pieces(), [&](int64_t begin, int64_t end) { kernels.causal_conv(mine, begin, end, buffer); });
    team.each(rows, [&](int64_t begin, int64_t end) { kernels.gated_rows(my_rows, begin, end); });
  });
  return output;
}

}  // namespace hfca

HFCA_OP(short_convolution, "(Tensor input, Tensor conv_weight, Tensor? conv_bias, Tensor(a!) conv_state) -> Tensor")
