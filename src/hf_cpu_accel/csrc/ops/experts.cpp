// experts_ffn: schema, checks, call.
#include "../experts/arguments.h"
#include "../tensors.h"

namespace hfca {
namespace {

constexpr const char* op = "experts_ffn";

// The caller's choice [tokens, top_k] as an assignment.
void read_choice(const Assignment& a, const Tensor& index, const Tensor& weights) {
  const Tensor chosen = torch::stable::contiguous(index), weight = torch::stable::contiguous(weights);
  const auto* from = static_cast<const int64_t*>(chosen.const_data_ptr());
  for (int64_t i = 0; i < a.slots(); ++i) {
    STD_TORCH_CHECK(0 <= from[i] && from[i] < a.experts, "hf_cpu_accel::experts_ffn: expert_index names expert ", from[i], " of ",
                    a.experts);
    a.expert[i] = static_cast<int32_t>(from[i]);
    a.weight[i] = is_bf16(weight) ? widened(static_cast<const uint16_t*>(weight.const_data_ptr())[i])
                                  : static_cast<const float*>(weight.const_data_ptr())[i];
  }
}

Tensor experts_ffn(const Tensor& hidden_states, const Tensor& expert_index, const Tensor& expert_weights, const Tensor& up,
                   const OptionalTensor& up_scale, const OptionalTensor& up_bias, const Tensor& down, const OptionalTensor& down_scale,
                   const OptionalTensor& down_bias, int64_t experts, int64_t intermediate_features, bool gated, const Text& activation,
                   double limit) {
  check_floating(hidden_states, op, "hidden_states");
  check_floating(expert_weights, op, "expert_weights");
  STD_TORCH_CHECK(hidden_states.dim() == 2, "hf_cpu_accel::experts_ffn: hidden_states must be [tokens, features]");
  const int64_t tokens = hidden_states.size(0), features = hidden_states.size(1);
  STD_TORCH_CHECK(expert_index.scalar_type() == ScalarType::Long && expert_index.dim() == 2 && expert_index.size(0) == tokens &&
                      sizes_of(expert_weights) == sizes_of(expert_index),
                  "hf_cpu_accel::experts_ffn: expert_index must be int64 [", tokens, ", top_k] and expert_weights of the same shape");
  STD_TORCH_CHECK(experts >= 1 && experts <= INT32_MAX && intermediate_features >= 1,
                  "hf_cpu_accel::experts_ffn: at least one expert of some width");
  const int64_t width = times_features(gated ? 2 : 1, intermediate_features);
  const Mixture m = mixture_of(op, gemm_of(op, tokens, times_features(experts, width), features, up, up_scale, up_bias),
                               gemm_of(op, tokens, times_features(experts, features), intermediate_features, down, down_scale, down_bias),
                               experts, expert_index.size(1), intermediate_features, features, activation_of(activation, op), gated, limit);
  Tensor output = empty_of(hidden_states, {tokens, features});
  if (tokens == 0) return output;
  const int64_t threads = team_size(multiply_adds(m, tokens)), rows = std::min(tokens, most_block_rows), words = input_words(m);
  const int64_t shared = MixtureMemory(m, tokens, nullptr).bytes;
  Workspace workspace(Workspace::size_of<char>(shared) + static_cast<size_t>(threads) * GemmMemory::size_of(rows, words));
  const MixtureMemory memory(m, tokens, workspace.take<char>(shared));
  std::vector<GemmMemory> packed;
  packed.reserve(static_cast<size_t>(threads));
  for (int64_t i = 0; i < threads; ++i) packed.emplace_back(workspace, rows, words);
  read_choice(memory.assignment, expert_index, expert_weights);
  sort_by_expert(memory.assignment, nullptr);
  Tensor keep = hidden_states;
  const Matrix input = as_rows(hidden_states, keep), sum{output.mutable_data_ptr(), features, is_bf16(output)};
  run_team(threads, [&](Team& team) {
    const GemmMemory mine = packed[static_cast<size_t>(team.slot())];
    run_mixture(team, m, memory, input, {}, sum, nullptr, 0, mine);
  });
  return output;
}

}  // namespace
}  // namespace hfca

HFCA_OP(experts_ffn,
        "(Tensor hidden_states, Tensor expert_index, Tensor expert_weights, Tensor up, Tensor? up_scale, Tensor? up_bias, Tensor down, "
        "Tensor? down_scale, Tensor? down_bias, SymInt experts, SymInt intermediate_features, bool gated, str activation, "
        "float limit) -> Tensor")
