// lstm_layer: schema, checks, call. All steps of a layer in one fork: the threads meet after each product and after each step's gates.
#include "../../gemm/arguments.h"
#include "../../gemm/driver.h"
#include "arguments.h"

namespace hfca {
namespace {

constexpr const char* op = "lstm_layer";

// One product of a step, of the rows of all sequences.
struct StepProduct {
  Gemm gemm;
  bool own = false;  // see GemmMemory

  StepProduct() = default;
  StepProduct(int64_t batch, int64_t outputs, int64_t inputs, const Tensor& weight, const OptionalTensor& scale)
      : gemm(gemm_of(op, batch, outputs, inputs, weight, scale, std::nullopt)), own(batch <= kernels_of(gemm).tile_rows) {}

  void run(const Team& team, GemmMemory memory, const float* input, const float* residual, float* output) const {
    Gemm g = gemm;
    g.input = {const_cast<float*>(input), g.k};
    if (residual) g.residual = {const_cast<float*>(residual), g.n};
    g.write_to({output, g.n});
    memory.own = own;
    run_gemm(team, g, memory);
  }
};

Tensor lstm_layer(const Tensor& gates, const Tensor& weight, const OptionalTensor& scale, const OptionalTensor& projection,
                  const OptionalTensor& projection_scale, const Tensor& hidden, const Tensor& cell, bool reverse) {
  STD_TORCH_CHECK(gates.is_cpu() && gates.scalar_type() == ScalarType::Float && gates.dim() == 3 && gates.is_contiguous() &&
                      gates.size(0) >= 1 && gates.size(2) % 4 == 0,
                  "hf_cpu_accel::lstm_layer: gates must be contiguous float32 [length, batch, 4 * features] of at least one step");
  const int64_t length = gates.size(0), batch = gates.size(1), features = gates.size(2) / 4;
  const int64_t outputs = projection && hidden.dim() == 2 ? hidden.size(1) : features;
  const float* first = static_cast<const float*>(state_of(hidden, {batch, outputs}, false, op, "hidden"));
  float* cells = static_cast<float*>(state_of(cell, {batch, features}, false, op, "cell"));
  Tensor output = empty_of(gates, {length, batch, outputs});
  if (output.numel() == 0 || features == 0) return output;

  const StepProduct recurrent(batch, 4 * features, outputs, weight, scale);
  const StepProduct projected = projection ? StepProduct(batch, outputs, features, *projection, projection_scale) : StepProduct();
  int64_t words = most_input_words(recurrent.gemm);
  double work = multiply_adds(recurrent.gemm) + static_cast<double>(batch * features * 64);
  if (projection) words = std::max(words, most_input_words(projected.gemm)), work += multiply_adds(projected.gemm);
  const int64_t threads = team_size(work);
  Workspace shared(Workspace::size_of<float>(4 * batch * features) + Workspace::size_of<float>(batch * features) +
                   static_cast<size_t>(threads) * GemmMemory::size_of(batch, words));
  float *sums = shared.take<float>(4 * batch * features), *inner = shared.take<float>(batch * features);
  std::vector<GemmMemory> memory;
  memory.reserve(static_cast<size_t>(threads));
  for (int64_t i = 0; i < threads; ++i) memory.emplace_back(shared, batch, words);
  const float* inputs = static_cast<const float*>(gates.const_data_ptr());
  float* results = static_cast<float*>(output.mutable_data_ptr());
  const RecurrentKernels& kernels = dispatch().kernels.recurrent;
  run_team(threads, [&](Team& team) {
    const StepProduct gate = recurrent, out = projected;  // not on the calling thread's stack: see gemm/driver.h
    const GemmMemory own = memory[static_cast<size_t>(team.slot())], common = memory[0];
    const bool projects = out.gemm.n > 0;
    const float* last = first;
    for (int64_t i = 0; i < length; ++i) {
      const int64_t t = reverse ? length - 1 - i : i;
      float* const result = results + t * batch * outputs;
      gate.run(team, gate.own ? own : common, last, inputs + t * batch * 4 * features, sums);
      const LstmStep step{sums, cells, projects ? inner : result, batch, features};
      team.each(step.pieces(), [&](int64_t begin, int64_t end) { kernels.lstm_step(step, begin, end); });
      if (projects) out.run(team, out.own ? own : common, inner, nullptr, result);
      last = result;
    }
  });
  return output;
}

}  // namespace
}  // namespace hfca

HFCA_OP(lstm_layer,
        "(Tensor gates, Tensor weight, Tensor? scale, Tensor? projection, Tensor? projection_scale, Tensor hidden, Tensor(a!) cell, "
        "bool reverse) -> Tensor")
