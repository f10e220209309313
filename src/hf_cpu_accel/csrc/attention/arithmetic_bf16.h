// Attention's arithmetic in bfloat16 with float32 sums, for queries, keys and values in bfloat16 where the CPU has a dot product of its
// own for it: twice the rate of float32. Products of queries and keys are exact, probabilities are rounded to 8 bits.
#pragma once
#include "scratch.h"

#if defined(HFCA_SIMD_AVX512) && defined(__AVX512BF16__)
#define HFCA_ARITHMETIC_BF16 1
#include "softmax_approx.h"

namespace HFCA_TIER {

class ArithmeticBf16 {
 public:
  static constexpr int rows_at_once = tile_rows;

  ArithmeticBf16(const hfca::Attention& a, const hfca::AttentionTask& task, Carver& memory)
      : a_(a),
        task_(task),
        words_(DotBf16::Words::count(a.head_dim)),
        keys_(memory, key_block, words_),
        queries_(memory, task.row_end - task.row_begin, padded_words(words_)) {
    values_ = memory.take<uint32_t>(key_block / 2 * round_up(a.value_dim, chunk));
    probabilities_ = memory.take<uint32_t>(tile_rows * key_block / 2);
  }

  void take_queries(int64_t row, int rows) const {
    int64_t at[tile_rows];
    locate_queries(a_, task_, row, rows, at);
    pack(a_.query, at, rows, queries_of(row));
  }

  void pack(const hfca::Heads& x, const int64_t* at, int rows, const PackedQueries& to) const {
    for (int i = 0; i < rows; ++i)
      for (int64_t w = 0; w < words_; w += Simd::width) Simd::store_words(packed_word(to.data, rows, i, w), words_at(of(x) + at[i], w));
  }

  void take_keys(int64_t begin, int64_t end) const {
    const int64_t start = start_of(a_.key, begin);
    pack(a_.key, [&](int64_t k) { return start + k * a_.key.position_stride; }, end - begin, keys_);
    pack_values(of(a_.value) + start_of(a_.value, begin), end - begin);
  }

  template <class At>
  void pack(const hfca::Heads& x, const At& at, int64_t count, const PackedKeys& to) const {
    pack_keys(of(x), at, count, to.data);
  }

  void score(const PackedQueries& queries, int rows, const PackedKeys& packed, int64_t keys, float* scores) const {
    multiply_chunks<DotBf16>(rows, queries.data, words_, packed.data, words_, keys, scores, false, a_.scale);
  }

  void score(int64_t row, int rows, int64_t keys, float* scores) const { score(queries_of(row), rows, keys_, keys, scores); }

  const PackedKeys& keys() const { return keys_; }
  PackedQueries queries_of(int64_t row) const { return queries_.from(row - task_.row_begin); }

  float exponentials(const float* scores, int rows, int i, int64_t visible, int64_t keys, float shift) const {
    return approx_exponentials(scores + i * chunk, static_cast<int64_t>(rows) * chunk, visible, keys, shift, 0.0f,
                               [&](int64_t key, auto, Float low, Float high) HFCA_INLINE {
                                 Simd::store_words(probabilities_ + (key / chunk * rows + i) * packed_words, Simd::bf16_words(low, high));
                               });
  }

  void weigh(const float*, int rows, int64_t keys, float* sums, bool accumulate) const {
    multiply_chunks<DotBf16>(rows, probabilities_, (keys + 1) / 2, values_, key_block / 2, a_.value_dim, sums, accumulate);
  }

 private:
  static_assert(chunk == 2 * Simd::width && chunk == 2 * packed_words && DotBf16::rows == tile_rows, "one shape of tiles");

  static const uint16_t* of(const hfca::Heads& x) { return static_cast<const uint16_t*>(x.data); }

  int64_t start_of(const hfca::Heads& x, int64_t position) const {
    return task_.batch * x.batch_stride + task_.kv_head * x.head_stride + position * x.position_stride;
  }

  // Words [w, w + width) of a row of features, zeros behind its end.
  Simd::Int words_at(const uint16_t* x, int64_t w) const {
    const int64_t left = a_.head_dim - 2 * w;
    return Simd::load_bf16_words(x + 2 * w, static_cast<int>(left < chunk ? left : chunk));
  }

  // To [keys / 32][words][32], transposed; the last chunk is filled up with zeros.
  template <class At>
  void pack_keys(const uint16_t* keys, const At& at, int64_t count, uint32_t* to) const {
    for (int64_t k = 0; k < round_up(count, chunk); k += Simd::width) {
      uint32_t* columns = to + k / chunk * chunk * words_ + k % chunk;
      for (int64_t w = 0; w < words_; w += Simd::width) {
        Float block[Simd::width];
        for (int i = 0; i < Simd::width; ++i) block[i] = k + i < count ? _mm512_castsi512_ps(words_at(keys + at(k + i), w)) : Simd::zero();
        Simd::transpose(block);
        for (int i = 0; i < Simd::width && w + i < words_; ++i) Simd::store(reinterpret_cast<float*>(columns + (w + i) * chunk), block[i]);
      }
    }
  }

  // To [value_dim / 32][keys / 2][32]: two keys meet in a word.
  void pack_values(const uint16_t* values, int64_t count) const {
    const int64_t stride = a_.value.position_stride;
    for (int64_t k = 0; k < count; k += 2, values += 2 * stride)
      for (int64_t d = 0; d < a_.value_dim; d += Simd::width) {
        const int n = lanes(a_.value_dim - d);
        const Float low = Simd::load_bf16_n(values + d, n), high = k + 1 < count ? Simd::load_bf16_n(values + stride + d, n) : Simd::zero();
        Simd::store_words(values_ + (d / chunk * (key_block / 2) + k / 2) * chunk + d % chunk, Simd::bf16_couples(low, high));
      }
  }

  const hfca::Attention& a_;
  const hfca::AttentionTask& task_;
  int64_t words_;  // of the features of a head
  PackedKeys keys_;
  PackedQueries queries_;
  uint32_t *values_, *probabilities_;
};

}  // namespace HFCA_TIER

#endif
