// From an op's mask to what the attention kernels read.
#pragma once
#include <algorithm>
#include <optional>
#include <vector>

#include "../tensors.h"
#include "attention.h"

namespace hfca {

// int8 keys and values are those of ops/kv_cache.py.
inline HeadType head_type(const Tensor& t, const char* op, const char* name) {
  if (t.scalar_type() == ScalarType::Char && t.is_cpu()) return HeadType::int8;
  check_floating(t, op, name);
  return floating(is_bf16(t));
}

// Elements that hold so many features.
inline int64_t width_of(HeadType type, int64_t features) { return features + (type == HeadType::int8 ? head_scale_bytes : 0); }

// Positions [begin, end) of a sequence.
struct TokenRange {
  int64_t begin, end;
};

// From the first to the last token of a sequence whose padding mask (true: a token) is `row`; empty if there is none.
inline TokenRange token_range(const bool* row, int64_t length) {
  int64_t begin = 0, end = length;
  while (end > 0 && !row[end - 1]) --end;
  while (begin < end && !row[begin]) ++begin;
  return {begin, end};
}

inline bool has_holes(const bool* row, TokenRange range) { return std::find(row + range.begin, row + range.end, false) != row + range.end; }

// A mask [batch or 1, heads or 1, q_len or 1, kv_len], boolean or added.
inline void read_mask(Attention& a, const Tensor& mask, const int64_t (&sizes)[4], const char* op, Tensor& keep) {
  STD_TORCH_CHECK(mask.dim() == 4 && mask.size(3) == sizes[3], "hf_cpu_accel::", op,
                  ": mask must be [batch, kv_len] boolean or have four "
                  "dimensions of which the last is kv_len");
  if (mask.scalar_type() != ScalarType::Bool) check_floating(mask, op, "mask");
  keep = mask.size(3) == 1 || mask.stride(3) == 1 ? mask : torch::stable::contiguous(mask);
  int64_t strides[3];
  for (int64_t i = 0; i < 3; ++i) {
    STD_TORCH_CHECK(mask.size(i) == sizes[i] || mask.size(i) == 1, "hf_cpu_accel::", op, ": dimension ", i, " of mask must be 1 or ",
                    sizes[i]);
    strides[i] = mask.size(i) == 1 ? 0 : keep.stride(i);
  }
  a.mask_kind = mask.scalar_type() == ScalarType::Bool ? MaskKind::boolean : is_bf16(mask) ? MaskKind::bfloat16 : MaskKind::float32;
  a.mask = keep.const_data_ptr();
  a.mask_batch_stride = strides[0], a.mask_head_stride = strides[1], a.mask_query_stride = strides[2];
}

// Tables [rows, heads * head_size] and an index int32 [2 * length - 1] of their rows; see RelativePositions. `keep` holds their memory.
inline RelativePositions read_positions(const std::optional<Tensor>& keys, const std::optional<Tensor>& queries,
                                        const std::optional<Tensor>& index, int64_t length, int64_t features, int64_t head_size,
                                        const char* op, std::vector<Tensor>& keep) {
  STD_TORCH_CHECK((keys || queries) && index && index->scalar_type() == ScalarType::Int && index->is_cpu() && index->dim() == 1 &&
                      index->is_contiguous() && index->size(0) == std::max<int64_t>(2 * length - 1, 0),
                  "hf_cpu_accel::", op, ": position_keys or position_queries go with a position_index, contiguous int32 [2 * length - 1]");
  RelativePositions positions;
  positions.length = length;
  positions.index = static_cast<const int32_t*>(index->const_data_ptr());
  int64_t rows = INT32_MAX;
  const auto read = [&](const std::optional<Tensor>& table, const char* name) {
    if (!table) return Heads{};
    check_floating(*table, op, name);
    STD_TORCH_CHECK(table->dim() == 2 && table->size(0) > 0 && table->size(1) == features, "hf_cpu_accel::", op, ": ", name,
                    " must be [rows, ", features, "]");
    keep.push_back(torch::stable::contiguous(*table));
    rows = std::min(rows, table->size(0));
    return Heads{keep.back().mutable_data_ptr(), 0, head_size, features, floating(is_bf16(*table))};
  };
  positions.key = read(keys, "position_keys"), positions.query = read(queries, "position_queries");
  for (int64_t i = 0; i < index->size(0); ++i)
    STD_TORCH_CHECK(positions.index[i] >= 0 && positions.index[i] < rows, "hf_cpu_accel::", op,
                    ": position_index must hold rows from 0 to ", rows - 1, ", and has ", positions.index[i]);
  return positions;
}

}  // namespace hfca
