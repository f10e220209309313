// linear, linear_split, ffn and gated_ffn: schema, checks, call.
#include <vector>

#include "../gemm/gemm_op.h"
#include "../gemm/arguments.h"
#include "../tensors.h"

namespace hfca {
namespace {

Tensor output_for(const Tensor& input, int64_t features) {
  auto sizes = sizes_of(input);
  sizes.back() = features;
  return empty_of(input, sizes);
}

Matrix residual_rows(const OptionalTensor& residual, const Tensor& output, const char* op, Tensor& keep) {
  if (!residual) return {};
  check_floating(*residual, op, "residual");
  STD_TORCH_CHECK(sizes_of(*residual) == sizes_of(output), "hf_cpu_accel::", op, ": residual must have the output's shape");
  return as_rows(*residual, keep);
}

Tensor linear(const Tensor& input, const Tensor& weight, const OptionalTensor& scale, const OptionalTensor& bias,
              const OptionalTensor& residual, int64_t out_features, const Text& activation) {
  check_input(input, "linear");
  Gemm g = gemm_of("linear", row_count(input), out_features, input.size(input.dim() - 1), weight, scale, bias,
                   activation_of(activation, "linear"));
  Tensor output = output_for(input, out_features);
  Tensor keep_input = input, keep_residual = input;
  g.input = as_rows(input, keep_input);
  g.residual = residual_rows(residual, output, "linear", keep_residual);
  g.write_to({output.mutable_data_ptr(), out_features, is_bf16(output)});
  run_gemm_op(g);
  return output;
}

// linear whose output features are divided among dense tensors of their own.
std::vector<Tensor> linear_split(const Tensor& input, const Tensor& weight, const OptionalTensor& scale, const OptionalTensor& bias,
                                 const std::vector<int64_t>& sizes) {
  check_input(input, "linear_split");
  int64_t out_features = 0;
  for (int64_t size : sizes) out_features = __builtin_add_overflow(out_features, size, &out_features) ? -1 : out_features;
  Gemm g = gemm_of("linear_split", row_count(input), out_features, input.size(input.dim() - 1), weight, scale, bias);
  split_outputs(g, sizes, "linear_split");
  Tensor keep_input = input;
  g.input = as_rows(input, keep_input);
  std::vector<Tensor> outputs;
  for (size_t i = 0; i < sizes.size(); ++i) {
    outputs.push_back(output_for(input, sizes[i]));
    g.outputs[i] = {outputs[i].mutable_data_ptr(), sizes[i], is_bf16(input)};
  }
  run_gemm_op(g);
  return outputs;
}

enum class Gate { none, first, last };

// down(activation(up(input))) + residual; with a gate: that half of up goes through the activation and is multiplied by the other half.
Tensor run_ffn(const char* op, Gate gate, const Tensor& input, const Tensor& up, const OptionalTensor& up_scale,
               const OptionalTensor& up_bias, const Tensor& down, const OptionalTensor& down_scale, const OptionalTensor& down_bias,
               const OptionalTensor& residual, int64_t intermediate_features, int64_t out_features, const Text& activation) {
  check_input(input, op);
  const bool gated = gate != Gate::none;
  STD_TORCH_CHECK(!gated || intermediate_features % panel_columns == 0, "hf_cpu_accel::", op,
                  ": intermediate_features must be a multiple of ", panel_columns);
  const int64_t m = row_count(input), up_features = times_features(gated ? 2 : 1, intermediate_features);
  Gemm first = gemm_of(op, m, up_features, input.size(input.dim() - 1), up, up_scale, up_bias, activation_of(activation, op));
  first.gated = gated, first.gate_last = gate == Gate::last;
  Gemm second = gemm_of(op, m, out_features, intermediate_features, down, down_scale, down_bias);
  Tensor output = output_for(input, out_features);
  Tensor keep_input = input, keep_residual = input;
  first.input = as_rows(input, keep_input);
  second.residual = residual_rows(residual, output, op, keep_residual);
  second.write_to({output.mutable_data_ptr(), out_features, is_bf16(output)});
  run_gemm_pair(first, second);
  return output;
}

Tensor ffn(const Tensor& input, const Tensor& up, const OptionalTensor& up_scale, const OptionalTensor& up_bias, const Tensor& down,
           const OptionalTensor& down_scale, const OptionalTensor& down_bias, const OptionalTensor& residual, int64_t intermediate_features,
           int64_t out_features, const Text& activation) {
  return run_ffn("ffn", Gate::none, input, up, up_scale, up_bias, down, down_scale, down_bias, residual, intermediate_features,
                 out_features, activation);
}

Tensor gated_ffn(const Tensor& input, const Tensor& up, const OptionalTensor& up_scale, const OptionalTensor& up_bias, const Tensor& down,
                 const OptionalTensor& down_scale, const OptionalTensor& down_bias, const OptionalTensor& residual,
                 int64_t intermediate_features, int64_t out_features, const Text& activation, bool gate_last) {
  return run_ffn("gated_ffn", gate_last ? Gate::last : Gate::first, input, up, up_scale, up_bias, down, down_scale, down_bias, residual,
                 intermediate_features, out_features, activation);
}

}  // namespace
}  // namespace hfca

HFCA_OP(linear,
        "(Tensor input, Tensor weight, Tensor? scale, Tensor? bias, Tensor? residual, SymInt out_features, str activation) -> Tensor")
HFCA_OP(linear_split, "(Tensor input, Tensor weight, Tensor? scale, Tensor? bias, int[] sizes) -> Tensor[]")
HFCA_OP(ffn,
        "(Tensor input, Tensor up, Tensor? up_scale, Tensor? up_bias, Tensor down, Tensor? down_scale, Tensor? down_bias, "
        "Tensor? residual, SymInt intermediate_features, SymInt out_features, str activation) -> Tensor")
HFCA_OP(gated_ffn,
        "(Tensor input, Tensor up, Tensor? up_scale, Tensor? up_bias, Tensor down, Tensor? down_scale, Tensor? down_bias, "
        "Tensor? residual, SymInt intermediate_features, SymInt out_features, str activation, bool gate_last=False) -> Tensor")
