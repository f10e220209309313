// attention: schema, checks, cutting into tasks, call.
#include <algorithm>
#include <cmath>

#include "dispatch.h"
#include "tensors.h"
#include "workspace.h"

namespace hfca {
namespace {

using torch::stable::contiguous;

struct KeyRange {
  int64_t begin, end;
};

// [batch, heads, positions, features] with dense features; `keep` holds the memory.
Heads heads_of(const Tensor& t, Tensor& keep) {
  keep = t.size(3) == 1 || t.stride(3) == 1 ? t : contiguous(t);
  return {keep.mutable_data_ptr(), keep.stride(0), keep.stride(1), keep.stride(2), is_bf16(keep)};
}

// Key padding [batch, kv_len]: keys before the first and after the last that may be attended are never looked at; the mask is kept
// only if there are holes between them.
std::vector<KeyRange> read_padding(Attention& a, const Tensor& mask, Tensor& keep) {
  keep = mask.size(1) == 1 || mask.stride(1) == 1 ? mask : contiguous(mask);
  std::vector<KeyRange> ranges(static_cast<size_t>(keep.size(0)));
  for (int64_t b = 0; b < keep.size(0); ++b) {
    const bool* row = static_cast<const bool*>(keep.const_data_ptr()) + b * keep.stride(0);
    int64_t begin = 0, end = a.kv_len;
    while (end > 0 && !row[end - 1]) --end;
    while (begin < end && !row[begin]) ++begin;
    ranges[static_cast<size_t>(b)] = {begin, end};
    if (std::find(row + begin, row + end, false) != row + end) {
      a.mask_kind = MaskKind::boolean;
      a.mask = keep.const_data_ptr();
      a.mask_batch_stride = keep.stride(0);
    }
  }
  return ranges;
}

// A mask [batch or 1, heads or 1, q_len or 1, kv_len], boolean or added.
void read_mask(Attention& a, const Tensor& mask, const int64_t (&sizes)[4], Tensor& keep) {
  STD_TORCH_CHECK(mask.dim() == 4 && mask.size(3) == sizes[3], "hf_cpu_accel::attention: mask must be [batch, kv_len] boolean or have four "
                  "dimensions of which the last is kv_len");
  keep = mask.size(3) == 1 || mask.stride(3) == 1 ? mask : contiguous(mask);
  int64_t strides[3];
  for (int64_t i = 0; i < 3; ++i) {
    STD_TORCH_CHECK(mask.size(i) == sizes[i] || mask.size(i) == 1, "hf_cpu_accel::attention: dimension ", i, " of mask must be 1 or ", sizes[i]);
    strides[i] = mask.size(i) == 1 ? 0 : keep.stride(i);
  }
  a.mask_kind = mask.scalar_type() == ScalarType::Bool ? MaskKind::boolean : is_bf16(mask) ? MaskKind::bfloat16 : MaskKind::float32;
  a.mask = keep.const_data_ptr();
  a.mask_batch_stride = strides[0], a.mask_head_stride = strides[1], a.mask_query_stride = strides[2];
}

// Into how many blocks the rows of each of `pairs` (batch, key head) are cut: as few as possible, since each packs the keys again,
// but enough to give every thread its share. Cost of the busiest thread, in rows; packing costs about as much as a few rows.
int64_t row_blocks(int64_t pairs, int64_t rows, int64_t tile_rows) {
  constexpr int64_t most_rows = 384, packing_rows = 8;  // 384 rows of 64 features: 200 KB of scratch
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t fewest = (rows + most_rows - 1) / most_rows, most = std::min((rows + tile_rows - 1) / tile_rows, fewest + 2 * threads);
  int64_t best = fewest, best_cost = INT64_MAX;
  for (int64_t blocks = fewest; blocks <= most; ++blocks) {
    const int64_t cost = (pairs * blocks + threads - 1) / threads * ((rows + blocks - 1) / blocks + packing_rows);
    if (cost < best_cost) best = blocks, best_cost = cost;
  }
  return best;
}

Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask, bool is_causal,
                 std::optional<double> scale) {
  check_floating(query, "attention", "query");
  check_floating(key, "attention", "key");
  check_floating(value, "attention", "value");
  STD_TORCH_CHECK(query.dim() == 4 && key.dim() == 4 && value.dim() == 4,
                  "hf_cpu_accel::attention: query, key and value must be [batch, heads, positions, features]");
  const int64_t batch = query.size(0), heads = query.size(1), kv_heads = key.size(1);
  Attention a;
  a.q_len = query.size(2), a.kv_len = key.size(2), a.head_dim = query.size(3), a.value_dim = value.size(3), a.causal = is_causal;
  STD_TORCH_CHECK(a.head_dim >= 1 && key.size(3) == a.head_dim && key.size(0) == batch && value.size(0) == batch && value.size(1) == kv_heads &&
                      value.size(2) == a.kv_len && (kv_heads == heads || (kv_heads > 0 && heads % kv_heads == 0)),
                  "hf_cpu_accel::attention: key and value do not fit the query");
  Tensor output = empty_of(query, {batch, a.q_len, heads, a.value_dim});
  if (batch * heads * a.q_len * a.value_dim == 0) return output;
  a.group = heads / kv_heads;
  a.scale = static_cast<float>(scale ? *scale : 1.0 / std::sqrt(static_cast<double>(a.head_dim)));
  Tensor keep_query = query, keep_key = key, keep_value = value, keep_mask = query;
  a.query = heads_of(query, keep_query), a.key = heads_of(key, keep_key), a.value = heads_of(value, keep_value);
  a.output = {output.mutable_data_ptr(), output.stride(0), output.stride(2), output.stride(1), is_bf16(output)};
  std::vector<KeyRange> ranges(static_cast<size_t>(batch), KeyRange{0, a.kv_len});
  if (mask) {
    const bool boolean = mask->scalar_type() == ScalarType::Bool;
    if (!boolean) check_floating(*mask, "attention", "mask");
    if (boolean && mask->dim() == 2) {
      STD_TORCH_CHECK(mask->size(0) == batch && mask->size(1) == a.kv_len, "hf_cpu_accel::attention: a mask of two dimensions must be [batch, kv_len]");
      ranges = read_padding(a, *mask, keep_mask);
    } else {
      read_mask(a, *mask, {batch, heads, a.q_len, a.kv_len}, keep_mask);
    }
  }

  const AttentionKernels& kernels = dispatch().attention;
  const int64_t rows = a.group * a.q_len, blocks = row_blocks(batch * kv_heads, rows, kernels.tile_rows);
  const int64_t scratch = kernels.scratch_floats(a, (rows + blocks - 1) / blocks);
  torch::stable::parallel_for(0, batch * kv_heads * blocks, 1, [&](int64_t begin, int64_t end) {
    Workspace workspace(Workspace::size_of<float>(scratch));
    float* memory = workspace.take<float>(scratch);
    const auto mine = a;  // not on the calling thread's stack: see gemm/driver.h
    for (int64_t t = begin; t < end; ++t) {
      const int64_t pair = t / blocks, block = t % blocks, b = pair / kv_heads;
      const KeyRange range = ranges[static_cast<size_t>(b)];
      kernels.run(mine, {b, pair % kv_heads, block * rows / blocks, (block + 1) * rows / blocks, range.begin, range.end}, memory);
    }
  });
  return output;
}

}  // namespace
}  // namespace hfca

STABLE_TORCH_LIBRARY_FRAGMENT(hf_cpu_accel, m) {
  m.def("attention(Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal, float? scale) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(hf_cpu_accel, CPU, m) { m.impl("attention", TORCH_BOX(&hfca::attention)); }
