// snake: schema, checks, call.
#include "../dispatch.h"
#include "../tensors.h"

namespace hfca {
namespace {

constexpr const char* op = "snake";

const float* numbers_of(const Tensor& t, int64_t channels, const char* name) {
  STD_TORCH_CHECK(t.is_cpu() && t.scalar_type() == ScalarType::Float && t.dim() == 1 && t.size(0) == channels && t.is_contiguous(),
                  "hf_cpu_accel::", op, ": ", name, " must be contiguous float32 [", channels, "]");
  return static_cast<const float*>(t.const_data_ptr());
}

Tensor snake(const Tensor& input, const Tensor& alpha, const Tensor& scale, bool channels_last) {
  check_floating(input, op, "input");
  STD_TORCH_CHECK(input.dim() == 3, "hf_cpu_accel::", op, ": input must be [batch, channels, length], or [batch, length, channels]");
  Snake s;
  s.channels_last = channels_last, s.bf16 = is_bf16(input);
  s.channels = input.size(channels_last ? 2 : 1), s.columns = input.size(2);
  s.alpha = numbers_of(alpha, s.channels, "alpha"), s.scale = numbers_of(scale, s.channels, "scale");
  Tensor output = empty_of(input, sizes_of(input));
  if (output.numel() == 0) return output;
  const Tensor dense = torch::stable::contiguous(input);
  s.input = dense.const_data_ptr(), s.output = output.mutable_data_ptr();
  const auto kernel = dispatch().kernels.snake;
  torch::stable::parallel_for(0, input.size(0) * input.size(1), 1 + grain_elements / s.columns, [&](int64_t begin, int64_t end) {
    const Snake mine = s;  // not on the calling thread's stack: see gemm/driver.h
    kernel(mine, begin, end);
  });
  return output;
}

}  // namespace
}  // namespace hfca

HFCA_OP(snake, "(Tensor input, Tensor alpha, Tensor scale, bool channels_last) -> Tensor")
