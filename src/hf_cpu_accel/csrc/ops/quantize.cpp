// quantize_int4 and pack_rotated: schemas, checks, calls.
#include <tuple>
#include <vector>

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

void pack_rotated(const Tensor& weight, int64_t group, const Tensor& data, const Tensor& scale) {
  check_floating(weight, "pack_rotated", "weight");
  STD_TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous(), "hf_cpu_accel::pack_rotated: weight must be a contiguous matrix");
  STD_TORCH_CHECK(group == 0 || group == 32 || group == 64 || group == 128, "hf_cpu_accel::pack_rotated: group must be 0, 32, 64 or 128");
  PackRotated p{weight.const_data_ptr(), is_bf16(weight), weight.size(0), weight.size(1), group};
  const int64_t panels = (p.rows + panel_rows - 1) / panel_rows;
  STD_TORCH_CHECK(data.is_cpu() && data.is_contiguous() && data.element_size() == 1 && data.numel() == panels * p.panel_bytes(),
                  "hf_cpu_accel::pack_rotated: data must be the bytes of ", panels, " panels of ", p.panel_bytes());
  STD_TORCH_CHECK(scale.is_cpu() && scale.is_contiguous() && scale.scalar_type() == ScalarType::Float && scale.numel() == 2 * p.rows,
                  "hf_cpu_accel::pack_rotated: scale must be float32 [2, rows]");
  p.data = static_cast<uint8_t*>(data.mutable_data_ptr());
  p.scale = static_cast<float*>(scale.mutable_data_ptr());
  p.sum = p.scale + p.rows;
  const auto padded = static_cast<size_t>((p.features() + 63) / 64 * 64);
  torch::stable::parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> values(padded);
    std::vector<uint8_t> bytes(padded);
    std::vector<int8_t> multiplier(group == 0 ? 0 : padded / static_cast<size_t>(group));
    dispatch().kernels.pack_rotated(p, begin, end, {values.data(), bytes.data(), multiplier.data()});
  });
}

}  // namespace
}  // namespace hfca

HFCA_OP(quantize_int4, "(Tensor weight, int group) -> (Tensor, Tensor, Tensor)")
HFCA_OP(pack_rotated, "(Tensor weight, int group, Tensor(a!) data, Tensor(b!) scale) -> ()")
