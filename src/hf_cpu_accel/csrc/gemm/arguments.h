// From an op's arguments to the weight side of a GEMM.
#pragma once
#include "../tensors.h"
#include "gemm.h"

namespace hfca {

inline Activation activation_of(const std::string& name, const char* op) {
  for (int i = 0; i < activations; ++i)
    if (name == activation_names[i]) return static_cast<Activation>(i);
  STD_TORCH_CHECK(false, "hf_cpu_accel::", op, ": unknown activation '", name, "'");
  return Activation::none;
}

inline WeightKind kind_of(const Tensor& weight, const char* op) {
  switch (weight.scalar_type()) {
    case ScalarType::Float: return weight.dim() == 2 ? WeightKind::float32_rows : WeightKind::float32;
    case ScalarType::BFloat16: return WeightKind::bfloat16;
    case ScalarType::Char:
      return weight.dim() == 3 ? WeightKind::int8_weight : weight.dim() == 5 ? WeightKind::int8_image : WeightKind::int8;
    case ScalarType::Byte:
      if (weight.dim() != 5) return WeightKind::int4;
      return weight.size(2) == 4 ? WeightKind::affine4 : WeightKind::affine8;
    default: STD_TORCH_CHECK(false, "hf_cpu_accel::", op, ": a packed weight is float32, bfloat16, int8 or uint8");
  }
  return WeightKind::float32;
}

constexpr int64_t most_features = int64_t{1} << 48;  // sums and products with what is in memory stay within an int64

// `times` as many, or more than most_features.
inline int64_t times_features(int64_t times, int64_t features) {
  int64_t product = 0;
  return __builtin_mul_overflow(times, features, &product) ? most_features + 1 : product;
}

constexpr int64_t max_integer_features = 65536;  // 255 * 127 * 65536 < 2^31

// The same for affine groups: [panels, groups, bits, bytes of a scale and an offset, the rest].
inline bool take_affine_weight(Gemm& g, const Tensor& weight) {
  if (!weight.is_contiguous() || weight.size(0) != (g.n + panel_columns - 1) / panel_columns) return false;
  const int64_t groups = weight.size(1), bits = weight.size(2), pair = weight.size(3);
  if ((bits != 4 && bits != 8) || (pair != 4 && pair != 8) || weight.size(4) > most_features) return false;
  g.group = (bits * pair * weight.size(4) / panel_columns - pair) * 8 / bits;
  g.half_scales = pair == 4;
  g.weight = weight.const_data_ptr();
  return g.group >= 16 && g.group % (g.group > 64 ? 64 : 16) == 0 && (g.group != 48) && g.group <= max_integer_features &&
         bits * pair * weight.size(4) == panel_columns * (pair + g.group * bits / 8) && groups == (g.k + g.group - 1) / g.group;
}

// Whether `weight` has the shape that packing/linear.py gives to n x k weights of g's kind; takes the group of int4 from it. pixels: of the
// window of a convolution.
inline bool take_weight(Gemm& g, const Tensor& weight, int64_t pixels = 0) {
  if (g.kind == WeightKind::affine4 || g.kind == WeightKind::affine8) return pixels == 0 && take_affine_weight(g, weight);
  if (g.kind == WeightKind::float32_rows) {
    g.weight = weight.const_data_ptr();
    return pixels == 0 && weight.is_contiguous() && weight.size(0) == g.n && weight.size(1) == g.k;
  }
  const bool blocks = g.kind == WeightKind::int8_weight || g.kind == WeightKind::int4, image = g.kind == WeightKind::int8_image;
  if (weight.dim() != (blocks  ? 3
                       : image ? 5
                               : 4) ||
      !weight.is_contiguous() || weight.size(0) != (g.n + panel_columns - 1) / panel_columns)
    return false;
  g.weight = weight.const_data_ptr();
  if (g.kind == WeightKind::int4) {
    g.group = (weight.size(2) - panel_columns) / (panel_columns / 2);
    const bool known = g.group == 32 || g.group == 64 || g.group == 128;
    return known && weight.size(2) == panel_columns + g.group * panel_columns / 2 && weight.size(1) == (g.k + g.group - 1) / g.group;
  }
  if (image)
    return pixels > 0 && weight.size(1) == pixels && weight.size(2) % 16 == 0 && pixels * weight.size(2) * 4 == g.k &&
           weight.size(3) == panel_columns && weight.size(4) == 4;
  const int64_t per_word = g.kind == WeightKind::float32 ? 1 : g.kind == WeightKind::bfloat16 ? 2 : 4;
  if (weight.size(1) != (g.k + per_word - 1) / per_word) return false;
  return blocks ? weight.size(2) == panel_columns * per_word : weight.size(2) == panel_columns && weight.size(3) == per_word;
}

// weight, scale: the tensors of a PackedWeight (packing/linear.py), which tell its kind.
inline Gemm gemm_of(const char* op, int64_t m, int64_t n, int64_t k, const Tensor& weight, const OptionalTensor& scale,
                    const OptionalTensor& bias, Activation activation = Activation::none, int64_t pixels = 0) {
  Gemm g;
  g.m = m, g.n = n, g.k = k, g.kind = kind_of(weight, op), g.activation = activation;
  STD_TORCH_CHECK(0 <= n && n <= most_features && 0 <= k && k <= most_features, "hf_cpu_accel::", op, ": no weight has ", k, " input and ",
                  n, " output features");
  STD_TORCH_CHECK(take_weight(g, weight, pixels), "hf_cpu_accel::", op, ": the packed weight does not fit ", k, " input and ", n,
                  " output features");
  if (g.kind == WeightKind::affine4 || g.kind == WeightKind::affine8) {
    STD_TORCH_CHECK(!scale, "hf_cpu_accel::", op, ": a weight of affine groups has its scales within");
  } else if (g.kind != WeightKind::float32 && g.kind != WeightKind::bfloat16 && g.kind != WeightKind::float32_rows) {
    STD_TORCH_CHECK(k <= max_integer_features, "hf_cpu_accel::", op, ": integer sums of more than ", max_integer_features,
                    " input features would overflow");
    STD_TORCH_CHECK(scale && scale->scalar_type() == ScalarType::Float && scale->dim() == 2 && scale->size(0) == 2 && scale->size(1) == n &&
                        scale->stride(1) == 1,
                    "hf_cpu_accel::", op, ": an integer weight needs float32 scales and sums [2, ", n, "]");
    g.weight_scale = static_cast<const float*>(scale->const_data_ptr());
    g.weight_sum = g.weight_scale + scale->stride(0);
  }
  g.bias = as_vector(bias, n, op, "bias");
  return g;
}

// The output features go to matrices of their own, `sizes` of them each.
inline void split_outputs(Gemm& g, const std::vector<int64_t>& sizes, const char* op) {
  STD_TORCH_CHECK(!sizes.empty() && sizes.size() <= max_outputs, "hf_cpu_accel::", op, ": sizes must have 1 to ", max_outputs, " entries");
  for (size_t i = 0; i < sizes.size(); ++i) {
    STD_TORCH_CHECK(sizes[i] > 0 && sizes[i] <= most_features && g.output_begin[i] % panel_columns == 0, "hf_cpu_accel::", op,
                    ": all sizes but the last must be multiples of ", panel_columns);
    g.output_begin[i + 1] = g.output_begin[i] + sizes[i];
  }
  STD_TORCH_CHECK(g.output_begin[sizes.size()] == g.n, "hf_cpu_accel::", op, ": sizes must add up to ", g.n);
}

}  // namespace hfca
