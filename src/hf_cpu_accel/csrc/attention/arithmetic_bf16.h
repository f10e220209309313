// Attention's arithmetic in bfloat16 with float32 sums, for queries, keys and values in bfloat16 where the CPU has products of its own for
// it: dot products have twice the rate of float32, ARM's products of small matrices up to four times. Products of queries and keys are exact,
// probabilities are rounded to 8 bits.
#pragma once
#include "../gemm/mmla.h"
#include "scratch.h"

#if HFCA_DOT_BF16 && (defined(HFCA_SIMD_AVX512) || HFCA_MMLA)
#define HFCA_ARITHMETIC_BF16 1
#include "softmax_approx.h"

namespace HFCA_TIER {

#if HFCA_MMLA
// Rows lie in pairs once pair() has brought them together. Integers have no products of values here that are faster, so that what a
// quantized model has in float32 is rounded to bfloat16, too.
struct ProductsBf16 {
  static constexpr int rows_at_once = MmlaGemm<MmlaBf16>::tile_rows;
  static bool takes(const hfca::Attention& a) { return a.may_be_bfloat16() && !a.rows; }
  static void pair(uint32_t* tile, int64_t words, int rows) { pair_rows(tile, padded_words(words) / packed_words, rows); }

  // As multiply_chunks.
  static void multiply(int rows, const uint32_t* left, int64_t words, const uint32_t* right, int64_t right_words, int64_t n, float* out,
                       bool accumulate, float factor = 1.0f) {
    alignas(64) float products[rows_at_once * chunk];
    const Float scale = Simd::set1(factor);
    for (int64_t c = 0; c < n; c += chunk, out += rows * chunk) {
      const uint32_t* const panel = right + c * right_words;
      multiply_of(rows)(left, panel, words, products, {reinterpret_cast<const char*>(panel), 0});
      for (int j = 0; j < rows * chunk; j += Simd::width) {
        const Float product = Simd::load(products + j);
        Simd::store(out + j, accumulate ? Simd::add(product, Simd::load(out + j)) : Simd::mul(product, scale));
      }
    }
  }

 private:
  using Multiply = void (*)(const uint32_t*, const uint32_t*, int64_t, float*, hfca::Ahead);

  static Multiply multiply_of(int rows) {
    switch (rows) {
#define HFCA_ROWS(R) \
  case R: return &multiply_pairs<MmlaBf16, R>;
      // clang-format off
      HFCA_ROWS(1) HFCA_ROWS(2) HFCA_ROWS(3) HFCA_ROWS(4) HFCA_ROWS(5) HFCA_ROWS(6)
      HFCA_ROWS(7) HFCA_ROWS(8) HFCA_ROWS(9) HFCA_ROWS(10) HFCA_ROWS(11) HFCA_ROWS(12)
      // clang-format on
#undef HFCA_ROWS
    }
    return nullptr;
  }
};
#else
struct ProductsBf16 {
  static constexpr int rows_at_once = tile_rows;
  static_assert(DotBf16::rows == tile_rows, "one shape of tiles");
  static bool takes(const hfca::Attention& a) {
    return a.are_bfloat16() && !a.rows && (!a.positions || a.positions->are(hfca::HeadType::bfloat16));
  }
  static void pair(uint32_t*, int64_t, int) {}

  static void multiply(int rows, const uint32_t* left, int64_t words, const uint32_t* right, int64_t right_words, int64_t n, float* out,
                       bool accumulate, float factor = 1.0f) {
    multiply_chunks<DotBf16>(rows, left, words, right, right_words, n, out, accumulate, factor);
  }
};
#endif

class ArithmeticBf16 {
 public:
  static constexpr int rows_at_once = ProductsBf16::rows_at_once;
  static bool takes(const hfca::Attention& a) { return ProductsBf16::takes(a); }

  ArithmeticBf16(const hfca::Attention& a, const hfca::AttentionTask& task, Carver& memory)
      : a_(a),
        task_(task),
        words_(DotBf16::Words::count(a.head_dim)),
        keys_(memory, key_block, words_),
        queries_(memory, task.row_end - task.row_begin, padded_words(words_)) {
    values_ = memory.take<uint32_t>(key_block / 2 * round_up(a.value_dim, chunk));
    probabilities_ = memory.take<uint32_t>(rows_at_once * key_block / 2);
  }

  void take_queries(int64_t row, int rows) const {
    int64_t at[rows_at_once];
    locate_queries(a_, task_, row, rows, at);
    pack(a_.query, at, rows, queries_of(row));
  }

  void pack(const hfca::Heads& x, const int64_t* at, int rows, const PackedQueries& to) const {
    for (int i = 0; i < rows; ++i)
      for (int64_t w = 0; w < words_; w += Simd::width) Simd::store_words(packed_word(to.data, rows, i, w), words_at(x, at[i], w));
    ProductsBf16::pair(to.data, words_, rows);
  }

  void take_keys(int64_t begin, int64_t end) const {
    const int64_t start = start_of(a_.key, begin);
    pack(a_.key, [&](int64_t k) { return start + k * a_.key.position_stride; }, end - begin, keys_);
    pack_values(start_of(a_.value, begin), end - begin);
  }

  // To [keys / 32][words][32], transposed; the last chunk is filled up with zeros.
  template <class At>
  void pack(const hfca::Heads& x, const At& at, int64_t count, const PackedKeys& to) const {
    for (int64_t k = 0; k < round_up(count, chunk); k += Simd::width) {
      uint32_t* columns = to.data + k / chunk * chunk * words_ + k % chunk;
      for (int64_t w = 0; w < words_; w += Simd::width) {
        Float block[Simd::width];
        for (int i = 0; i < Simd::width; ++i) block[i] = k + i < count ? Simd::words_as_floats(words_at(x, at(k + i), w)) : Simd::zero();
        Simd::transpose(block);
        for (int i = 0; i < Simd::width && w + i < words_; ++i) Simd::store(reinterpret_cast<float*>(columns + (w + i) * chunk), block[i]);
      }
    }
  }

  void score(const PackedQueries& queries, int rows, const PackedKeys& packed, int64_t keys, float* scores) const {
    ProductsBf16::multiply(rows, queries.data, words_, packed.data, words_, keys, scores, false, a_.scale);
  }

  void score(int64_t row, int rows, int64_t keys, float* scores) const { score(queries_of(row), rows, keys_, keys, scores); }

  const PackedKeys& keys() const { return keys_; }
  PackedQueries queries_of(int64_t row) const { return queries_.from(row - task_.row_begin); }

  float exponentials(const float* scores, int rows, int i, int64_t visible, int64_t keys, float shift) const {
    return approx_exponentials(scores + i * chunk, static_cast<int64_t>(rows) * chunk, visible, keys, shift, 0.0f,
                               [&](int64_t key, auto v, Float low, Float high) HFCA_INLINE {
                                 uint32_t* const to = probabilities_ + (key / chunk * rows + i) * packed_words;
                                 if constexpr (Simd::width == packed_words) {
                                   Simd::store_words(to, Simd::bf16_words(low, high));
                                 } else {
                                   uint16_t* const halves = reinterpret_cast<uint16_t*>(to) + v * Simd::width;
                                   Simd::store_bf16(halves, low);
                                   Simd::store_bf16(halves + chunk / 2, high);
                                 }
                               });
  }

  void weigh(const float*, int rows, int64_t keys, float* sums, bool accumulate) const {
    ProductsBf16::pair(probabilities_, (keys + 1) / 2, rows);
    ProductsBf16::multiply(rows, probabilities_, (keys + 1) / 2, values_, key_block / 2, a_.value_dim, sums, accumulate);
  }

 private:
  static_assert(chunk == 2 * packed_words && chunk == hfca::panel_columns, "one shape of tiles");

  int64_t start_of(const hfca::Heads& x, int64_t position) const {
    return task_.batch * x.batch_stride + task_.kv_head * x.head_stride + position * x.position_stride;
  }

  // Words [w, w + width) of the head at element `at`, zeros behind its end.
  Simd::Int words_at(const hfca::Heads& x, int64_t at, int64_t w) const {
    const int64_t left = a_.head_dim - 2 * w;
    if (x.type == hfca::HeadType::bfloat16) {
      const int n = left < 2 * Simd::width ? static_cast<int>(left) : 2 * Simd::width;
      return Simd::load_bf16_words(static_cast<const uint16_t*>(x.data) + at + 2 * w, n);
    }
    const float* const features = static_cast<const float*>(x.data) + at + 2 * w;
    return Simd::bf16_words(load_padded(features, 0, left), load_padded(features, Simd::width, left));
  }

  // To [value_dim / 32][keys / 2][32]: two keys meet in a word.
  void pack_values(int64_t at, int64_t count) const {
    with_head_type(a_.value, [&](auto type) {
      const int64_t stride = a_.value.position_stride;
      for (int64_t k = 0; k < count; k += 2, at += 2 * stride)
        for (int64_t d = 0; d < a_.value_dim; d += Simd::width) {
          const auto of = [&](int64_t key) HFCA_INLINE {
            return k + key < count ? load_features<decltype(type)::value>(a_.value.data, at + key * stride + d, lanes(a_.value_dim - d))
                                   : Simd::zero();
          };
          Simd::store_words(values_ + (d / chunk * (key_block / 2) + k / 2) * chunk + d % chunk, Simd::bf16_couples(of(0), of(1)));
        }
    });
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
