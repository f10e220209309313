// group_norm, with SiLU on its heels: schema, checks, layout, call.
#include <string>

#include "../dispatch.h"
#include "../tensors.h"
#include "../workspace.h"

namespace hfca {
namespace {

// The dimensions of [N, C, *] from the outermost to the innermost where the channels of a pixel lie together.
std::vector<size_t> channels_last_order(const Tensor& t) {
  std::vector<size_t> order{0};
  for (size_t i = 2; i < static_cast<size_t>(t.dim()); ++i) order.push_back(i);
  order.push_back(1);
  return order;
}

bool is_dense(const Tensor& t, const std::vector<size_t>& order) {
  int64_t count = 1;
  for (size_t place = order.size(); place-- > 0;) {
    const int64_t i = static_cast<int64_t>(order[place]);
    if (t.size(i) != 1 && t.stride(i) != count) return false;
    count *= t.size(i);
  }
  return true;
}

void run_planes(const GroupNorm& norm, int64_t images) {
  const int64_t elements = norm.channels / norm.groups * norm.pixels;
  torch::stable::parallel_for(0, images * norm.groups, 1 + grain_elements / elements, [&](int64_t begin, int64_t end) {
    const int64_t count = group_norm_vectors * norm.channels;
    Workspace workspace(Workspace::size_of<float>(count));
    const GroupNorm mine = norm;  // not on the calling thread's stack: see gemm/driver.h
    dispatch().kernels.group_norm.planes(mine, begin, end, workspace.take<float>(count));
  });
}

void run_channels_last(const GroupNorm& norm, int64_t images) {
  const GroupNormKernels& kernels = dispatch().kernels.group_norm;
  const int64_t chunks = (norm.pixels + group_norm_chunk - 1) / group_norm_chunk;
  const int64_t grain = 1 + grain_elements / (group_norm_chunk * norm.channels);
  const int64_t per_image = chunks * group_norm_moments * norm.channels, vectors = group_norm_vectors * norm.channels;
  Workspace workspace(Workspace::size_of<float>(images * per_image) + Workspace::size_of<float>(images * vectors));
  float *moments = workspace.take<float>(images * per_image), *all = workspace.take<float>(images * vectors);
  const auto each_chunk = [&](const auto& f) {
    torch::stable::parallel_for(0, images * chunks, grain, [&](int64_t begin, int64_t end) {
      const GroupNorm mine = norm;
      for (int64_t i = begin; i < end; ++i) {
        const int64_t first = i % chunks * group_norm_chunk;
        f(mine, i / chunks, first, first + group_norm_chunk < mine.pixels ? first + group_norm_chunk : mine.pixels);
      }
    });
  };
  each_chunk([=, &kernels](const GroupNorm& mine, int64_t image, int64_t first, int64_t last) {
    kernels.moments(mine, image, first, last, moments + image * per_image + first / group_norm_chunk * group_norm_moments * mine.channels);
  });
  for (int64_t image = 0; image < images; ++image) kernels.combine(norm, moments + image * per_image, all + image * vectors);
  each_chunk([=, &kernels](const GroupNorm& mine, int64_t image, int64_t first, int64_t last) {
    kernels.apply(mine, image, first, last, all + image * vectors);
  });
}

Tensor group_norm(const Tensor& input, int64_t groups, const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                  const Text& activation) {
  check_floating(input, "group_norm", "input");
  STD_TORCH_CHECK(input.dim() >= 2, "hf_cpu_accel::group_norm: input must be [N, C, *]");
  GroupNorm norm;
  norm.channels = input.size(1);
  norm.groups = groups;
  STD_TORCH_CHECK(groups > 0 && norm.channels % groups == 0, "hf_cpu_accel::group_norm: ", norm.channels, " channels do not make ", groups,
                  " groups");
  STD_TORCH_CHECK(activation == "none" || activation == "silu", "hf_cpu_accel::group_norm: activation must be none or silu");
  norm.silu = activation == "silu";
  norm.eps = static_cast<float>(eps);
  norm.weight = as_vector(weight, norm.channels, "group_norm", "weight");
  norm.bias = as_vector(bias, norm.channels, "group_norm", "bias");
  norm.bf16 = is_bf16(input);
  const std::vector<int64_t> sizes = sizes_of(input);
  const std::vector<size_t> order = channels_last_order(input);
  const bool channels_last = !input.is_contiguous() && is_dense(input, order);
  const Tensor dense = channels_last || input.is_contiguous() ? input : torch::stable::contiguous(input);
  Tensor output =
      channels_last ? empty_of(sizes, order, input.scalar_type(), static_cast<int64_t>(input.element_size())) : empty_of(input, sizes);
  norm.pixels = 1;
  for (size_t i = 2; i < sizes.size(); ++i) norm.pixels *= sizes[i];
  if (sizes[0] == 0 || norm.channels == 0 || norm.pixels == 0) return output;
  norm.input = dense.mutable_data_ptr();
  norm.output = output.mutable_data_ptr();
  (channels_last ? run_channels_last : run_planes)(norm, sizes[0]);
  return output;
}

}  // namespace
}  // namespace hfca

HFCA_OP(group_norm, "(Tensor input, int groups, Tensor? weight, Tensor? bias, float eps, str activation) -> Tensor")
