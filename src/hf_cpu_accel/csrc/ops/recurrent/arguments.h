// What the ops of recurrent layers have in common: checks of their arguments.
#pragma once
#include "../../dispatch.h"
#include "../../team.h"
#include "../../tensors.h"
#include "../../workspace.h"

#include <algorithm>

namespace hfca {

// [batch, length, columns] as rows.
inline Matrix rows_of(const Tensor& t, const Tensor& first, int64_t columns, Tensor& keep, const char* op, const char* name) {
  check_floating(t, op, name);
  const bool fits = t.dim() == 3 && t.size(0) == first.size(0) && t.size(1) == first.size(1) && t.size(2) == columns;
  STD_TORCH_CHECK(fits, "hf_cpu_accel::", op, ": ", name, " must be [batch, length, ", columns,
                  "] with the batch and length of the first argument");
  return as_rows(t, keep);
}

// A state that is written in place.
inline void* state_of(const Tensor& t, const std::vector<int64_t>& sizes, bool may_be_bf16, const char* op, const char* name) {
  STD_TORCH_CHECK(t.is_cpu() && (t.scalar_type() == ScalarType::Float || (may_be_bf16 && is_bf16(t))), "hf_cpu_accel::", op, ": ", name,
                  may_be_bf16 ? " must be float32 or bfloat16" : " must be float32");
  std::string shape;
  for (int64_t size : sizes) shape += (shape.empty() ? "[" : ", ") + std::to_string(size);
  STD_TORCH_CHECK(sizes_of(t) == sizes && t.is_contiguous(), "hf_cpu_accel::", op, ": ", name, " must be contiguous ", shape, "]");
  return t.mutable_data_ptr();
}

// A convolution of `channels` channels, without its input and output.
inline CausalConv conv_of(const Tensor& first, int64_t channels, const Tensor& weight, const OptionalTensor& bias, const Tensor& state,
                          const char* op) {
  check_floating(weight, op, "conv_weight");
  const bool fits = weight.dim() == 3 && weight.size(0) == channels && weight.size(1) == 1 && weight.size(2) >= 1 && weight.is_contiguous();
  STD_TORCH_CHECK(fits, "hf_cpu_accel::", op, ": conv_weight must be contiguous [", channels, ", 1, taps]");
  CausalConv conv;
  conv.batch = first.size(0), conv.length = first.size(1), conv.channels = channels, conv.taps = weight.size(2);
  conv.weight = {weight.mutable_data_ptr(), is_bf16(weight)};
  conv.bias = as_vector(bias, channels, op, "conv_bias");
  conv.state = {state_of(state, {conv.batch, channels, conv.taps}, true, op, "conv_state"), is_bf16(state)};
  return conv;
}

// Of a mask, bool [batch, length].
inline const bool* tokens_of(const Tensor& tokens, int64_t batch, int64_t length, const char* op) {
  STD_TORCH_CHECK(tokens.scalar_type() == ScalarType::Bool && tokens.is_cpu() && tokens.is_contiguous() &&
                      sizes_of(tokens) == (std::vector<int64_t>{batch, length}),
                  "hf_cpu_accel::", op, ": tokens must be contiguous bool [batch, length]");
  return static_cast<const bool*>(tokens.mutable_data_ptr());
}

inline void check_sequence(const Tensor& t, const char* op, const char* name) {
  check_floating(t, op, name);
  STD_TORCH_CHECK(t.dim() == 3 && t.size(1) >= 1, "hf_cpu_accel::", op, ": ", name,
                  " must be [batch, length, features] of at least one token");
}

}  // namespace hfca
