// layer_norm, rms_norm and their forms with a residual: schema, checks, call.
#include <tuple>

#include "../dispatch.h"
#include "../tensors.h"
#include "../workspace.h"

namespace hfca {
namespace {

// Normalizes the rows of `input` (+ `residual`, whose sum goes to `sum`).
Tensor run_norm(const char* op, bool rms, const Tensor& input, const Tensor* residual, Tensor* sum, const OptionalTensor& weight,
                const OptionalTensor& bias, double eps) {
  Norm norm;
  norm.columns = input.size(input.dim() - 1);
  norm.eps = static_cast<float>(eps);
  norm.weight = as_vector(weight, norm.columns, op, "weight");
  norm.bias = as_vector(bias, norm.columns, op, "bias");
  Tensor output = empty_of(input, sizes_of(input));
  const int64_t rows = row_count(input);
  if (rows == 0 || norm.columns == 0) return output;
  Tensor keep_input = input, keep_residual = input;
  norm.input = as_rows(input, keep_input);
  norm.output = {output.mutable_data_ptr(), norm.columns, is_bf16(output)};
  if (residual) {
    norm.residual = as_rows(*residual, keep_residual);
    norm.sum = {sum->mutable_data_ptr(), norm.columns, is_bf16(*sum)};
  }
  const auto kernel = rms ? dispatch().kernels.norm.rms_norm : dispatch().kernels.norm.layer_norm;
  torch::stable::parallel_for(0, rows, 1 + grain_elements / norm.columns, [&](int64_t begin, int64_t end) {
    const int64_t count = norm_buffer_rows * norm.columns;
    Workspace workspace(Workspace::size_of<float>(count));
    const Norm mine = norm;  // not on the calling thread's stack: see gemm/driver.h
    kernel(mine, begin, end, workspace.take<float>(count));
  });
  return output;
}

std::tuple<Tensor, Tensor> run_add_norm(const char* op, bool rms, const Tensor& input, const Tensor& residual, const OptionalTensor& weight,
                                        const OptionalTensor& bias, double eps) {
  check_input(input, op);
  check_floating(residual, op, "residual");
  STD_TORCH_CHECK(sizes_of(residual) == sizes_of(input), "hf_cpu_accel::", op, ": residual must have the input's shape");
  Tensor sum = empty_of(input, sizes_of(input));
  Tensor output = run_norm(op, rms, input, &residual, &sum, weight, bias, eps);
  return {output, sum};
}

Tensor layer_norm(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias, double eps) {
  check_input(input, "layer_norm");
  return run_norm("layer_norm", false, input, nullptr, nullptr, weight, bias, eps);
}

Tensor rms_norm(const Tensor& input, const OptionalTensor& weight, double eps) {
  check_input(input, "rms_norm");
  return run_norm("rms_norm", true, input, nullptr, nullptr, weight, std::nullopt, eps);
}

std::tuple<Tensor, Tensor> add_layer_norm(const Tensor& input, const Tensor& residual, const OptionalTensor& weight,
                                          const OptionalTensor& bias, double eps) {
  return run_add_norm("add_layer_norm", false, input, residual, weight, bias, eps);
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& input, const Tensor& residual, const OptionalTensor& weight, double eps) {
  return run_add_norm("add_rms_norm", true, input, residual, weight, std::nullopt, eps);
}

}  // namespace
}  // namespace hfca

HFCA_OP(layer_norm, "(Tensor input, Tensor? weight, Tensor? bias, float eps) -> Tensor")
HFCA_OP(rms_norm, "(Tensor input, Tensor? weight, float eps) -> Tensor")
HFCA_OP(add_layer_norm, "(Tensor input, Tensor residual, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor)")
HFCA_OP(add_rms_norm, "(Tensor input, Tensor residual, Tensor? weight, float eps) -> (Tensor, Tensor)")
