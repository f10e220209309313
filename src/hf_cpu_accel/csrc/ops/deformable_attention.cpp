// deformable_attention: schema, checks, call.
#include "../dispatch.h"
#include "../tensors.h"
#include "../workspace.h"

namespace hfca {
namespace {

constexpr const char* op = "deformable_attention";

std::vector<ImageLevel> levels_of(const std::vector<int64_t>& sizes, const std::vector<int64_t>& counts, int64_t pixels, int64_t points) {
  STD_TORCH_CHECK(sizes.size() == 2 * counts.size(), "hf_cpu_accel::", op, ": sizes must be a height and a width for each of counts");
  std::vector<ImageLevel> levels;
  levels.reserve(counts.size());
  for (size_t i = 0; i < counts.size(); ++i) {
    const int64_t height = sizes[2 * i], width = sizes[2 * i + 1];
    STD_TORCH_CHECK(0 <= height && 0 <= width && width <= INT32_MAX && height <= INT32_MAX && height * width <= pixels && 0 <= counts[i] &&
                        counts[i] <= points,
                    "hf_cpu_accel::", op, ": sizes or counts name more than there is");
    const ImageLevel* last = levels.empty() ? nullptr : &levels.back();
    levels.push_back({height, width, last ? last->first + last->height * last->width : 0, counts[i]});
    pixels -= height * width, points -= counts[i];
  }
  STD_TORCH_CHECK(pixels == 0 && points == 0, "hf_cpu_accel::", op, ": sizes must be of all pixels of value, and counts of all points");
  return levels;
}

const float* floats_of(const Tensor& t, const std::vector<int64_t>& sizes, const char* name) {
  STD_TORCH_CHECK(t.is_cpu() && t.scalar_type() == ScalarType::Float && sizes_of(t) == sizes && t.is_contiguous(), "hf_cpu_accel::", op,
                  ": ", name, " must be contiguous float32 [batch, queries, heads, points] with the batch and heads of value");
  return static_cast<const float*>(t.const_data_ptr());
}

Tensor deformable_attention(const Tensor& value, const std::vector<int64_t>& sizes, const std::vector<int64_t>& counts,
                            const Tensor& points, const Tensor& weights) {
  check_floating(value, op, "value");
  STD_TORCH_CHECK(
      value.dim() == 4 && (value.size(3) <= 1 || value.stride(3) == 1) && weights.dim() == 4, "hf_cpu_accel::", op,
      ": value must be [batch, pixels, heads, features] with a dense last dimension, and weights [batch, queries, heads, points]");
  const int64_t batch = value.size(0), queries = weights.size(1), heads = value.size(2);
  DeformableAttention a;
  a.bf16 = is_bf16(value);
  a.queries = queries, a.heads = heads, a.features = value.size(3), a.points_of_head = weights.size(3);
  a.weights = floats_of(weights, {batch, queries, heads, a.points_of_head}, "weights");
  a.points = floats_of(points, {batch, queries, heads, a.points_of_head, 2}, "points");
  const std::vector<ImageLevel> levels = levels_of(sizes, counts, value.size(1), a.points_of_head);
  a.levels = levels.data(), a.level_count = static_cast<int64_t>(levels.size());
  for (int64_t i = 0; i < 3; ++i) a.value_strides[i] = value.stride(i);
  a.value = value.const_data_ptr();
  Tensor output = empty_of(value, {batch, queries, heads * a.features});
  if (output.numel() == 0) return output;
  a.output = output.mutable_data_ptr();
  const auto kernel = dispatch().kernels.deformable_attention;
  const int64_t work = heads * (a.features + 16) * (a.corners() + 1);
  torch::stable::parallel_for(0, batch * queries, 1 + grain_elements / work, [&](int64_t begin, int64_t end) {
    Workspace workspace(Workspace::size_of<Corner>(a.corners() + 1));
    const DeformableAttention mine = a;  // not on the calling thread's stack: see gemm/driver.h
    kernel(mine, begin, end, workspace.take<Corner>(mine.corners() + 1));
  });
  return output;
}

}  // namespace
}  // namespace hfca

HFCA_OP(deformable_attention, "(Tensor value, int[] sizes, int[] counts, Tensor points, Tensor weights) -> Tensor")
