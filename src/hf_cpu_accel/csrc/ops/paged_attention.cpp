// paged_attention: schema, checks, call.
#include "../attention/arguments.h"
#include "../attention/driver.h"

namespace hfca {
namespace {

constexpr const char* op = "paged_attention";

// Where sequences begin: int32 [sequences + 1], from 0 to `end`.
const int32_t* beginnings(const Tensor& t, const char* name, int64_t sequences, int64_t end) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Int && t.is_cpu() && t.dim() == 1 && t.size(0) == sequences + 1 && t.is_contiguous(),
                  "hf_cpu_accel::paged_attention: ", name, " must be int32 [sequences + 1], contiguous");
  const auto* begin = static_cast<const int32_t*>(t.const_data_ptr());
  bool rises = begin[0] == 0 && begin[sequences] == end;
  for (int64_t i = 0; i < sequences; ++i) rises &= begin[i] <= begin[i + 1];
  STD_TORCH_CHECK(rises, "hf_cpu_accel::paged_attention: ", name, " must rise from 0 to ", end);
  return begin;
}

// [slots, heads, features], dense features, a slot of which is a "batch" of one position.
Heads slots_of(const Tensor& t, const char* name, HeadType type, int64_t kv_heads, int64_t width) {
  STD_TORCH_CHECK(t.dim() == 3 && t.size(1) == kv_heads && t.size(2) == width && (width == 1 || t.stride(2) == 1),
                  "hf_cpu_accel::paged_attention: ", name, " must be [slots, ", kv_heads, ", ", width, "], with a dense last dimension");
  return {const_cast<void*>(t.const_data_ptr()), t.stride(0), t.stride(1), 0, type};
}

Tensor paged_attention(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& query_begin, const Tensor& key_begin,
                       const Tensor& slots, int64_t window, double scale) {
  check_floating(query, op, "query");
  const HeadType key_type = head_type(key, op, "key"), value_type = head_type(value, op, "value");
  STD_TORCH_CHECK(
      query.dim() == 3 && key.dim() == 3 && value.dim() == 3 && (query.size(2) == 1 || query.stride(2) == 1),
      "hf_cpu_accel::paged_attention: query, key and value must be [tokens or slots, heads, features], query with a dense last dimension");
  STD_TORCH_CHECK(0 <= window, "hf_cpu_accel::paged_attention: window must be the number of keys that a query sees, or 0 for all");
  const int64_t tokens = query.size(0), heads = query.size(1), kv_heads = key.size(1),
                sequences = query_begin.dim() == 1 ? query_begin.size(0) - 1 : -1;
  Attention shared;
  shared.head_dim = query.size(2), shared.value_dim = value.size(2) - width_of(value_type, 0);
  STD_TORCH_CHECK(kv_heads > 0 && heads % kv_heads == 0 && shared.head_dim >= 1 && shared.value_dim >= 0 && value.size(0) == key.size(0) &&
                      sequences >= 0,
                  "hf_cpu_accel::paged_attention: key and value do not fit the query");
  shared.key = slots_of(key, "key", key_type, kv_heads, width_of(key_type, shared.head_dim));
  shared.value = slots_of(value, "value", value_type, kv_heads, value.size(2));
  STD_TORCH_CHECK(slots.scalar_type() == ScalarType::Int && slots.is_cpu() && slots.dim() == 1 && slots.is_contiguous(),
                  "hf_cpu_accel::paged_attention: slots must be int32 [keys], contiguous");
  const auto* slot = static_cast<const int32_t*>(slots.const_data_ptr());
  const int64_t keys = slots.size(0);
  const auto inside = [&](int32_t s) { return 0 <= s && s < key.size(0); };
  STD_TORCH_CHECK(std::all_of(slot, slot + keys, inside), "hf_cpu_accel::paged_attention: slots name some that key does not have");
  const int32_t *first_query = beginnings(query_begin, "query_begin", sequences, tokens),
                *first_key = beginnings(key_begin, "key_begin", sequences, keys);

  Tensor output = empty_of(query, {tokens, heads, shared.value_dim});
  shared.group = heads / kv_heads, shared.causal = true, shared.window = window;
  shared.scale = static_cast<float>(scale);
  shared.query = {const_cast<void*>(query.const_data_ptr()), 0, query.stride(1), query.stride(0), floating(is_bf16(query))};
  shared.output = {output.mutable_data_ptr(), 0, shared.value_dim, heads * shared.value_dim, floating(is_bf16(output))};
  std::vector<AttentionSequence> all;
  for (int64_t i = 0; i < sequences; ++i) {
    Attention a = shared;
    a.q_len = first_query[i + 1] - first_query[i], a.kv_len = first_key[i + 1] - first_key[i];
    STD_TORCH_CHECK(a.q_len <= a.kv_len, "hf_cpu_accel::paged_attention: sequence ", i, " has more queries than keys");
    if (a.q_len == 0 || a.value_dim == 0) continue;
    a.query.data = a.query.at(first_query[i] * a.query.position_stride),
    a.output.data = a.output.at(first_query[i] * a.output.position_stride);
    a.rows = slot + first_key[i], a.row_keys = a.kv_len;
    all.push_back({a, 0, 0, a.kv_len});
  }
  if (!all.empty()) run_attention(all, kv_heads);
  return output;
}

}  // namespace
}  // namespace hfca

HFCA_OP(paged_attention,
        "(Tensor query, Tensor key, Tensor value, Tensor query_begin, Tensor key_begin, Tensor slots, int window, float scale) -> Tensor")
