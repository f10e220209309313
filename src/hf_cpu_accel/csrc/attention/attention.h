// What a tier's attention offers and what it is given: plain data, no torch.
//
//   output[b, q, h] = softmax(scale * query[b, h, q] . key[b, g, k] + mask[b, h, q, k], over k) value[b, g, k],   g = h / group
//
// (with the decoders' variants of the scores),
// computed block by block with a running maximum and sum, so that no [q_len, kv_len] matrix ever exists (Dao et al. 2022,
// arXiv:2205.14135, section 3.1). The query heads that share a key head are treated as more query rows of it: row r of a
// (batch, key head) pair is query r % q_len of head r / q_len of the group, so that keys are packed once for the whole group.
#pragma once
#include <cstdint>
#include <cstring>

namespace hfca {

// int8: features are followed by the float32 by which they are to be multiplied, in so many bytes.
enum class HeadType : int { float32 = 0, bfloat16, int8 };
constexpr int64_t head_scale_bytes = sizeof(float);

inline HeadType floating(bool bf16) { return bf16 ? HeadType::bfloat16 : HeadType::float32; }

// A tensor [batch, head, position, feature] whose features are dense. Strides count elements.
struct Heads {
  void* data = nullptr;
  int64_t batch_stride = 0, head_stride = 0, position_stride = 0;
  HeadType type = HeadType::float32;

  char* at(int64_t element) const {
    return static_cast<char*>(data) + element * (type == HeadType::float32 ? 4 : type == HeadType::bfloat16 ? 2 : 1);
  }
  // That of the vector of `features` which begins at `element`.
  float scale(int64_t element, int64_t features) const {
    float scale = 1.0f;
    if (type == HeadType::int8) std::memcpy(&scale, at(element) + features, sizeof(scale));
    return scale;
  }
};

enum class MaskKind : int { none = 0, boolean, float32, bfloat16 };

// Two tables of vectors for what lies between two tokens (disentangled attention, He et al. 2021, arXiv:2006.03654, section 3.1): a score
// gains scale * (query . key[i] + query[i] . key) with i = index[q - k + length - 1], for queries and keys of one sequence, at most `length` long.
struct RelativePositions {
  Heads key, query;  // [head, row, feature]; one of them may have no data
  const int32_t* index = nullptr;  // [2 * length - 1]
  int64_t length = 0;
  float* packed = nullptr;  // [heads][packed_floats], see AttentionKernels
  int64_t packed_floats = 0;
  bool is_packed = false;  // already

  int64_t count() const { return 2 * length - 1; }
  bool are(HeadType type) const { return (!key.data || key.type == type) && (!query.data || query.type == type); }
  int64_t row(int64_t i) const { return index[i < 0 ? 0 : i < count() ? i : count() - 1]; }
};

struct Attention {
  int64_t q_len = 0, kv_len = 0;
  int64_t group = 1;                         // query heads per key head
  int64_t head_dim = 0, value_dim = 0;
  Heads query, key, value, output;
  MaskKind mask_kind = MaskKind::none;       // true = attend; floating masks are added
  const void* mask = nullptr;                // [batch, query head, query, key], dense keys, stride 0 where broadcast
  int64_t mask_batch_stride = 0, mask_head_stride = 0, mask_query_stride = 0;
  bool causal = false;                       // query i sees keys <= i + kv_len - q_len
  int64_t window = 0;                        // and of these, the last `window`; 0: all
  int64_t global_keys = 0;                   // and so many first ones in any case
  float scale = 1.0f;
  float softcap = 0.0f;                      // scores become softcap * tanh(score / softcap); 0: they stay
  const float* alibi = nullptr;              // [query head], what a score loses per position between query and key
  const float* relative = nullptr;  // [query head][relative_count], what a score gains for a key behind the query: the last entry for the
  int64_t relative_count = 0;  // query's own position, the first for all that are so far behind, or farther
  const RelativePositions* positions = nullptr;  // neither causal nor grouped, and all keys are given
  const float* sinks = nullptr;  // [query head], a score that counts in the sum and has no value
  const int32_t* rows = nullptr;  // the "batch" in which each of the first row_keys keys lies; the others lie in their own
  int64_t row_keys = 0;
  bool quantized = false;  // may be computed in integers, where the CPU has the instructions: arithmetic_int8.h

  // Of queries, keys and values; those of a quantized model may be rounded to it.
  bool are_bfloat16() const {
    return query.type == HeadType::bfloat16 && key.type == HeadType::bfloat16 && value.type == HeadType::bfloat16;
  }
  bool may_be_bfloat16() const { return are_bfloat16() || (quantized && key.type != HeadType::int8 && value.type != HeadType::int8); }
  int64_t batch_of_key(int64_t key, int64_t own) const { return key < row_keys ? rows[key] : own; }
  int64_t first_visible(int64_t position) const {  // behind the global keys
    const int64_t first = position + kv_len - q_len - window + 1;
    return window > 0 && first > global_keys ? first : global_keys;
  }
  int64_t first_key(int64_t position) const { return global_keys > 0 ? 0 : first_visible(position); }
};

// Keys that few queries attend to are cut into parts of so many, and begin at a multiple of the smaller number, both counted from the origin
// of their sequence.
constexpr int64_t part_keys = 256, key_alignment = 32;

// Work of one call: rows [row_begin, row_end) of one (batch, key head) pair against keys [kv_begin, kv_end); all others are masked.
// `cut`: part by part. With `partial`, which has partial_floats for each of them, merge makes the output of all parts.
struct AttentionTask {
  int64_t batch, kv_head, row_begin, row_end, kv_begin, kv_end;
  bool cut = false;
  int64_t origin = 0;
  float* partial = nullptr;

  // Where the part with this key ends.
  int64_t end_of_part(int64_t key) const {
    const int64_t end = origin + ((key - origin) / part_keys + 1) * part_keys;
    return end < kv_end ? end : kv_end;
  }
};

struct AttentionKernels {
  int tile_rows;  // rows that are computed together
  int64_t few_queries;  // up to so many, the time of a task is that of reading the keys
  int64_t (*scratch_floats)(const Attention&, int64_t rows);  // for a task of so many rows
  int64_t (*partial_floats)(const Attention&, int64_t rows);
  void (*run)(const Attention&, const AttentionTask&, float* scratch);  // scratch: 64-byte aligned
  void (*merge)(const Attention&, const AttentionTask& first, int64_t parts);  // whose partials follow one another
  int64_t (*position_floats)(const Attention&);  // that relative positions are packed into, for one head
  void (*pack_positions)(const Attention&, int64_t head);  // to be done before tasks run
};

}  // namespace hfca
