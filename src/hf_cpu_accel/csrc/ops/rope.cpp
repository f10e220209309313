// rotary_embedding: schema, checks, call.
#include "../dispatch.h"
#include "../tensors.h"

namespace hfca {
namespace {

constexpr const char* op = "rotary_embedding";

RotaryTable table(const Tensor& t, const Tensor& input, const char* name) {
  check_floating(t, op, name);
  const bool fits =
      t.dim() == 3 && (t.size(0) == 1 || t.size(0) == input.size(0)) && t.size(1) == input.size(1) && t.size(2) == input.size(3);
  STD_TORCH_CHECK(fits && (t.size(2) <= 1 || t.stride(2) == 1), "hf_cpu_accel::", op, ": ", name,
                  " must be [1 or batch, length, features] with a dense last dimension, as the input is [batch, length, heads, features]");
  return {{t.mutable_data_ptr(), is_bf16(t)}, t.size(0) == 1 ? 0 : t.stride(0), t.stride(1)};
}

HeadRows heads_of(const Tensor& t) { return {t.mutable_data_ptr(), is_bf16(t), t.stride(0), t.stride(1), t.stride(2)}; }

Tensor rotary_embedding(const Tensor& input, const Tensor& cos, const Tensor& sin, bool interleaved) {
  check_floating(input, op, "input");
  STD_TORCH_CHECK(input.dim() == 4 && input.size(3) % 2 == 0, "hf_cpu_accel::", op,
                  ": input must be [batch, length, heads, an even number of features]");
  RotaryEmbedding r;
  r.length = input.size(1), r.heads = input.size(2), r.features = input.size(3), r.interleaved = interleaved;
  r.cos = table(cos, input, "cos"), r.sin = table(sin, input, "sin");
  Tensor output = empty_of(input, sizes_of(input));
  if (output.numel() == 0) return output;
  const Tensor dense = input.stride(3) == 1 ? input : torch::stable::contiguous(input);
  r.input = heads_of(dense), r.output = heads_of(output);
  const auto kernel = dispatch().kernels.rotary_embedding;
  torch::stable::parallel_for(0, input.size(0) * r.length, 1 + grain_elements / (r.heads * r.features), [&](int64_t begin, int64_t end) {
    const RotaryEmbedding mine = r;  // not on the calling thread's stack: see gemm/driver.h
    kernel(mine, begin, end);
  });
  return output;
}

}  // namespace
}  // namespace hfca

HFCA_OP(rotary_embedding, "(Tensor input, Tensor cos, Tensor sin, bool interleaved) -> Tensor")
