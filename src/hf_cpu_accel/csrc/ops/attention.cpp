// attention: schema, checks, call.
#include <algorithm>
#include <cmath>

#include "../attention/arguments.h"
#include "../attention/driver.h"

namespace hfca {
namespace {

// [batch, heads, positions, features] with dense features; `keep` holds the memory.
Heads heads_of(const Tensor& t, HeadType type, Tensor& keep) {
  keep = t.size(3) == 1 || t.stride(3) == 1 ? t : torch::stable::contiguous(t);
  return {keep.mutable_data_ptr(), keep.stride(0), keep.stride(1), keep.stride(2), type};
}

// Key padding [batch, kv_len]: keys before the first and after the last that may be attended are never looked at; the mask is kept
// only if there are holes between them.
std::vector<TokenRange> read_padding(Attention& a, const Tensor& mask, Tensor& keep) {
  keep = mask.size(1) == 1 || mask.stride(1) == 1 ? mask : torch::stable::contiguous(mask);
  std::vector<TokenRange> ranges(static_cast<size_t>(keep.size(0)));
  for (int64_t b = 0; b < keep.size(0); ++b) {
    const bool* row = static_cast<const bool*>(keep.const_data_ptr()) + b * keep.stride(0);
    const TokenRange range = ranges[static_cast<size_t>(b)] = token_range(row, a.kv_len);
    if (has_holes(row, range)) {
      a.mask_kind = MaskKind::boolean;
      a.mask = keep.const_data_ptr();
      a.mask_batch_stride = keep.stride(0);
    }
  }
  return ranges;
}

// Each query sees so many keys before its own and, if not causal, after it: as of queries that stand so many positions further on.
void see_window(std::vector<AttentionSequence>& sequences, int64_t window, int64_t global_keys, bool is_causal) {
  for (AttentionSequence& s : sequences) {
    window = std::min(window, s.attention.q_len + s.attention.kv_len);  // all
    const int64_t ahead = is_causal ? 0 : window;
    s.attention.causal = true, s.attention.window = window + ahead + 1;
    s.attention.kv_len += ahead, s.attention.global_keys = global_keys;
  }
}

Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& mask, bool is_causal,
                 std::optional<double> scale, std::optional<double> softcap, std::optional<int64_t> window, int64_t global_keys) {
  check_floating(query, "attention", "query");
  const HeadType key_type = head_type(key, "attention", "key"), value_type = head_type(value, "attention", "value");
  STD_TORCH_CHECK(query.dim() == 4 && key.dim() == 4 && value.dim() == 4,
                  "hf_cpu_accel::attention: query, key and value must be [batch, heads, positions, features]");
  const int64_t batch = query.size(0), heads = query.size(1), kv_heads = key.size(1);
  Attention a;
  a.q_len = query.size(2), a.kv_len = key.size(2), a.head_dim = query.size(3), a.value_dim = value.size(3) - width_of(value_type, 0),
  a.causal = is_causal;
  STD_TORCH_CHECK(a.head_dim >= 1 && key.size(3) == width_of(key_type, a.head_dim) && a.value_dim >= 0 && key.size(0) == batch &&
                      value.size(0) == batch && value.size(1) == kv_heads && value.size(2) == a.kv_len &&
                      (kv_heads == heads || (kv_heads > 0 && heads % kv_heads == 0)),
                  "hf_cpu_accel::attention: key and value do not fit the query");
  STD_TORCH_CHECK(!softcap || *softcap > 0, "hf_cpu_accel::attention: softcap must be more than 0");
  a.softcap = softcap ? static_cast<float>(*softcap) : 0.0f;
  STD_TORCH_CHECK(!window || *window >= 0, "hf_cpu_accel::attention: window must be 0 or more");
  STD_TORCH_CHECK(0 <= global_keys && global_keys <= a.kv_len && ((window && !is_causal) || !global_keys),
                  "hf_cpu_accel::attention: global_keys must be some of the keys, beside a window, and not causal");
  Tensor output = empty_of(query, {batch, a.q_len, heads, a.value_dim});
  a.scale = static_cast<float>(scale ? *scale : 1.0 / std::sqrt(static_cast<double>(a.head_dim)));
  Tensor keep_query = query, keep_key = key, keep_value = value, keep_mask = query;
  a.query = heads_of(query, floating(is_bf16(query)), keep_query);
  a.key = heads_of(key, key_type, keep_key), a.value = heads_of(value, value_type, keep_value);
  a.output = {output.mutable_data_ptr(), output.stride(0), output.stride(2), output.stride(1), floating(is_bf16(output))};
  std::vector<TokenRange> ranges(static_cast<size_t>(batch), TokenRange{0, a.kv_len});
  if (mask) {
    if (mask->scalar_type() == ScalarType::Bool && mask->dim() == 2) {
      STD_TORCH_CHECK(mask->size(0) == batch && mask->size(1) == a.kv_len,
                      "hf_cpu_accel::attention: a mask of two dimensions must be [batch, kv_len]");
      ranges = read_padding(a, *mask, keep_mask);
    } else {
      read_mask(a, *mask, {batch, heads, a.q_len, a.kv_len}, "attention", keep_mask);
    }
  }

  if (batch * heads * a.q_len * a.value_dim == 0) return output;
  a.group = heads / kv_heads;
  std::vector<AttentionSequence> sequences(static_cast<size_t>(batch));
  for (int64_t b = 0; b < batch; ++b) {
    const TokenRange range = ranges[static_cast<size_t>(b)];
    sequences[static_cast<size_t>(b)] = {a, b, range.begin, range.end};
  }
  if (window) see_window(sequences, *window, global_keys, is_causal);
  run_attention(sequences, kv_heads);
  return output;
}

}  // namespace
}  // namespace hfca

HFCA_OP(attention,
        "(Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal, float? scale, float? softcap=None, "
        "int? window=None, int global_keys=0) -> Tensor")
