// linear, linear_split and ffn: schema, checks, call.
#include "gemm/driver.h"
#include "tensors.h"

namespace hfca {
namespace {

Activation activation_of(const std::string& name, const char* op) {
  const char* const names[] = {"none", "gelu", "gelu_tanh", "relu", "silu", "quick_gelu", "tanh"};
  for (int i = 0; i < 7; ++i)
    if (name == names[i]) return static_cast<Activation>(i);
  STD_TORCH_CHECK(false, "hf_cpu_accel::", op, ": unknown activation '", name, "'");
  return Activation::none;
}

WeightKind kind_of(const Tensor& weight, const char* op) {
  switch (weight.scalar_type()) {
    case ScalarType::Float: return WeightKind::float32;
    case ScalarType::BFloat16: return WeightKind::bfloat16;
    case ScalarType::Char: return WeightKind::int8;
    default: STD_TORCH_CHECK(false, "hf_cpu_accel::", op, ": a packed weight is float32, bfloat16 or int8");
  }
  return WeightKind::float32;
}

constexpr int64_t max_int8_features = 65536;  // 255 * 127 * 65536 < 2^31

// Weight side of a GEMM. weight: [panels, k_words, 32, values per word]; scale (int8 only): [2, n], scales then sums.
Gemm gemm_of(const char* op, int64_t m, int64_t n, int64_t k, const Tensor& weight, const std::optional<Tensor>& scale,
             const std::optional<Tensor>& bias, Activation activation) {
  Gemm g;
  g.m = m, g.n = n, g.k = k, g.kind = kind_of(weight, op), g.activation = activation;
  const int64_t per_word = g.kind == WeightKind::int8 ? 4 : g.kind == WeightKind::bfloat16 ? 2 : 1;
  STD_TORCH_CHECK(weight.dim() == 4 && weight.is_contiguous() && weight.size(0) == (n + panel_columns - 1) / panel_columns &&
                      weight.size(1) == (k + per_word - 1) / per_word && weight.size(2) == panel_columns && weight.size(3) == per_word,
                  "hf_cpu_accel::", op, ": the packed weight does not fit ", k, " input and ", n, " output features");
  g.weight = weight.const_data_ptr();
  if (g.kind == WeightKind::int8) {
    STD_TORCH_CHECK(k <= max_int8_features, "hf_cpu_accel::", op, ": int8 sums of more than ", max_int8_features, " input features would overflow");
    STD_TORCH_CHECK(scale && scale->scalar_type() == ScalarType::Float && scale->dim() == 2 && scale->size(0) == 2 && scale->size(1) == n &&
                        scale->stride(1) == 1,
                    "hf_cpu_accel::", op, ": an int8 weight needs float32 scales and sums [2, ", n, "]");
    g.weight_scale = static_cast<const float*>(scale->const_data_ptr());
    g.weight_sum = g.weight_scale + scale->stride(0);
  }
  g.bias = as_vector(bias, n, op, "bias");
  plan_gemm(g);
  return g;
}

Tensor output_for(const Tensor& input, int64_t features) {
  auto sizes = sizes_of(input);
  sizes.back() = features;
  return empty_of(input, sizes);
}

void write_to(Gemm& g, Matrix output) {
  g.outputs[0] = output;
  g.output_begin[1] = g.n;
}

Matrix residual_rows(const std::optional<Tensor>& residual, const Tensor& output, const char* op, Tensor& keep) {
  if (!residual) return {};
  check_floating(*residual, op, "residual");
  STD_TORCH_CHECK(sizes_of(*residual) == sizes_of(output), "hf_cpu_accel::", op, ": residual must have the output's shape");
  return as_rows(*residual, keep);
}

Tensor linear(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& scale, const std::optional<Tensor>& bias,
              const std::optional<Tensor>& residual, int64_t out_features, const std::string& activation) {
  check_floating(input, "linear", "input");
  STD_TORCH_CHECK(input.dim() >= 1, "hf_cpu_accel::linear: input must have at least one dimension");
  Gemm g = gemm_of("linear", row_count(input), out_features, input.size(input.dim() - 1), weight, scale, bias,
                   activation_of(activation, "linear"));
  Tensor output = output_for(input, out_features);
  Tensor keep_input = input, keep_residual = input;
  g.input = as_rows(input, keep_input);
  g.residual = residual_rows(residual, output, "linear", keep_residual);
  write_to(g, {output.mutable_data_ptr(), out_features, is_bf16(output)});
  Workspace workspace(gemm_workspace(g));
  run_gemm(g, workspace);
  return output;
}

// linear whose output features are divided among dense tensors of their own.
std::vector<Tensor> linear_split(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& scale, const std::optional<Tensor>& bias,
                                 const std::vector<int64_t>& sizes) {
  check_floating(input, "linear_split", "input");
  STD_TORCH_CHECK(input.dim() >= 1, "hf_cpu_accel::linear_split: input must have at least one dimension");
  STD_TORCH_CHECK(!sizes.empty() && sizes.size() <= max_outputs, "hf_cpu_accel::linear_split: sizes must have 1 to ", max_outputs, " entries");
  int64_t out_features = 0;
  for (int64_t size : sizes) {
    STD_TORCH_CHECK(size > 0 && out_features % panel_columns == 0, "hf_cpu_accel::linear_split: all sizes but the last must be multiples of ",
                    panel_columns);
    out_features += size;
  }
  Gemm g = gemm_of("linear_split", row_count(input), out_features, input.size(input.dim() - 1), weight, scale, bias, Activation::none);
  Tensor keep_input = input;
  g.input = as_rows(input, keep_input);
  std::vector<Tensor> outputs;
  for (size_t i = 0; i < sizes.size(); ++i) {
    outputs.push_back(output_for(input, sizes[i]));
    g.outputs[i] = {outputs[i].mutable_data_ptr(), sizes[i], is_bf16(input)};
    g.output_begin[i + 1] = g.output_begin[i] + sizes[i];
  }
  Workspace workspace(gemm_workspace(g));
  run_gemm(g, workspace);
  return outputs;
}

// down(activation(up(input))) + residual. The intermediate stays in float32 workspace memory.
Tensor ffn(const Tensor& input, const Tensor& up, const std::optional<Tensor>& up_scale, const std::optional<Tensor>& up_bias, const Tensor& down,
           const std::optional<Tensor>& down_scale, const std::optional<Tensor>& down_bias, const std::optional<Tensor>& residual,
           int64_t intermediate_features, int64_t out_features, const std::string& activation) {
  check_floating(input, "ffn", "input");
  STD_TORCH_CHECK(input.dim() >= 1, "hf_cpu_accel::ffn: input must have at least one dimension");
  const int64_t m = row_count(input);
  Gemm first = gemm_of("ffn", m, intermediate_features, input.size(input.dim() - 1), up, up_scale, up_bias, activation_of(activation, "ffn"));
  Gemm second = gemm_of("ffn", m, out_features, intermediate_features, down, down_scale, down_bias, Activation::none);
  Tensor output = output_for(input, out_features);
  Tensor keep_input = input, keep_residual = input;
  Workspace workspace(gemm_workspace(first) + gemm_workspace(second) + Workspace::size_of<float>(m * intermediate_features));
  first.input = as_rows(input, keep_input);
  second.input = {workspace.take<float>(m * intermediate_features), intermediate_features, false};
  write_to(first, second.input);
  second.residual = residual_rows(residual, output, "ffn", keep_residual);
  write_to(second, {output.mutable_data_ptr(), out_features, is_bf16(output)});
  run_gemm(first, workspace);
  run_gemm(second, workspace);
  return output;
}

}  // namespace
}  // namespace hfca

STABLE_TORCH_LIBRARY_FRAGMENT(hf_cpu_accel, m) {
  m.def(
      "linear(Tensor input, Tensor weight, Tensor? scale, Tensor? bias, Tensor? residual, SymInt out_features, str activation) -> Tensor");
  m.def("linear_split(Tensor input, Tensor weight, Tensor? scale, Tensor? bias, int[] sizes) -> Tensor[]");
  m.def(
      "ffn(Tensor input, Tensor up, Tensor? up_scale, Tensor? up_bias, Tensor down, Tensor? down_scale, Tensor? down_bias, "
      "Tensor? residual, SymInt intermediate_features, SymInt out_features, str activation) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(hf_cpu_accel, CPU, m) {
  m.impl("linear", TORCH_BOX(&hfca::linear));
  m.impl("linear_split", TORCH_BOX(&hfca::linear_split));
  m.impl("ffn", TORCH_BOX(&hfca::ffn));
}
