// quantize_int4: schema, checks, call.
#include <tuple>

#include "../dispatch.h"
#include "../tensors.h"

namespace hfca {
namespace {

std::tuple<Tensor, Tensor, Tensor> quantize_int4(const Tensor& weight, int64_t group) {
  STD_TORCH_CHECK(weight.scalar_type() == ScalarType::Float && weight.is_cpu() && weight.dim() == 2 && weight.is_contiguous(),
                  "hf_cpu_accel::quantize_int4: weight must be a contiguous float32 matrix on the CPU");
  STD_TORCH_CHECK((group == 32 || group == 64 || group == 128) && weight.size(1) % group == 0,
                  "hf_cpu_accel::quantize_int4: group must be 32, 64 or 128 and divide the weight's columns");
  const int64_t rows = weight.size(0), columns = weight.size(1);
  Tensor index = empty_of({rows, columns}, ScalarType::Byte, 1), multiplier = empty_of({rows, columns / group}, ScalarType::Char, 1);
  Tensor scale = empty_of(weight, {2, rows});
  float* const scales = static_cast<float*>(scale.mutable_data_ptr());
  const QuantizeInt4 q{
      static_cast<const float*>(weight.const_data_ptr()),  columns, group,        static_cast<uint8_t*>(index.mutable_data_ptr()),
      static_cast<int8_t*>(multiplier.mutable_data_ptr()), scales,  scales + rows};
  torch::stable::parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) { dispatch().kernels.quantize_int4(q, begin, end); });
  return {index, multiplier, scale};
}

}  // namespace
}  // namespace hfca

HFCA_OP(quantize_int4, "(Tensor weight, int group) -> (Tensor, Tensor, Tensor)")
