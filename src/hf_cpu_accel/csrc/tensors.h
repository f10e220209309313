// Between torch's stable tensors and the kernels' plain views: checks and conversions that every op needs.
#pragma once
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "buffers.h"
#include "gemm/gemm.h"
#include "op.h"
#include "text.h"

namespace hfca {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr int64_t grain_elements = 16384;  // of what threads share out: below this a fork costs more than it saves

inline bool is_bf16(const Tensor& t) { return t.scalar_type() == ScalarType::BFloat16; }

inline void check_floating(const Tensor& t, const char* op, const char* name) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float || is_bf16(t), "hf_cpu_accel::", op, ": ", name, " must be float32 or bfloat16");
  STD_TORCH_CHECK(t.is_cpu(), "hf_cpu_accel::", op, ": ", name, " must be on the CPU");
}

inline void check_input(const Tensor& input, const char* op) {
  check_floating(input, op, "input");
  STD_TORCH_CHECK(input.dim() >= 1, "hf_cpu_accel::", op, ": input must have at least one dimension");
}

inline std::vector<int64_t> sizes_of(const Tensor& t) {
  std::vector<int64_t> sizes(static_cast<size_t>(t.dim()));
  for (int64_t i = 0; i < t.dim(); ++i) sizes[static_cast<size_t>(i)] = t.size(i);
  return sizes;
}

// A dense tensor whose memory is reused (buffers.h); its contents are arbitrary.
// `order` tells the dimensions from the outermost to the innermost in memory.
inline Tensor empty_of(const std::vector<int64_t>& sizes, const std::vector<size_t>& order, ScalarType dtype, int64_t element_size) {
  std::vector<int64_t> strides(sizes.size());
  int64_t count = 1;
  bool overflow = false;
  for (size_t place = order.size(); place-- > 0;) {
    const size_t i = order[place];
    strides[i] = count;
    overflow |= __builtin_mul_overflow(count, sizes[i] > 0 ? sizes[i] : 1, &count);
  }
  for (int64_t size : sizes) count = size == 0 ? 0 : count;
  int64_t bytes = 0;
  const bool fits = !overflow && !__builtin_mul_overflow(count, element_size, &bytes);
  STD_TORCH_CHECK(fits, "hf_cpu_accel: an output of so many elements does not exist");
  void* data = take_buffer(static_cast<size_t>(bytes));
  const torch::stable::Device cpu(torch::headeronly::DeviceType::CPU, -1);
  return torch::stable::from_blob(data, sizes, strides, cpu, dtype, &return_buffer);
}

inline Tensor empty_of(const std::vector<int64_t>& sizes, ScalarType dtype, int64_t element_size) {
  std::vector<size_t> order(sizes.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  return empty_of(sizes, order, dtype, element_size);
}

// The same in `like`'s dtype.
inline Tensor empty_of(const Tensor& like, const std::vector<int64_t>& sizes) {
  return empty_of(sizes, like.scalar_type(), static_cast<int64_t>(like.element_size()));
}

// The tensor as rows of its last dimension. Rows at one common stride are taken as they are, anything else is made contiguous;
// `keep` holds the memory that the view points to.
inline Matrix as_rows(const Tensor& t, Tensor& keep) {
  keep = t;
  const int64_t last = t.dim() - 1;
  bool uniform = t.size(last) <= 1 || t.stride(last) == 1;
  int64_t stride = t.size(last), expected = -1;
  for (int64_t i = last - 1; uniform && i >= 0; --i) {
    if (t.size(i) == 1) continue;
    if (expected < 0) stride = t.stride(i);
    else uniform = t.stride(i) == expected;
    expected = t.stride(i) * t.size(i);
  }
  if (!uniform) {
    keep = torch::stable::contiguous(t);
    stride = t.size(last);
  }
  return {keep.mutable_data_ptr(), stride, is_bf16(t)};
}

inline int64_t row_count(const Tensor& t) {
  int64_t rows = 1;
  for (int64_t i = 0; i + 1 < t.dim(); ++i) rows *= t.size(i);
  return rows;
}

// An optional dense vector of `length` float32 or bfloat16.
inline Array as_vector(const OptionalTensor& t, int64_t length, const char* op, const char* name) {
  if (!t) return {};
  check_floating(*t, op, name);
  STD_TORCH_CHECK(t->dim() == 1 && t->size(0) == length && t->is_contiguous(), "hf_cpu_accel::", op, ": ", name,
                  " must be a contiguous vector of ", length, " elements");
  return {t->mutable_data_ptr(), is_bf16(*t)};
}

}  // namespace hfca
