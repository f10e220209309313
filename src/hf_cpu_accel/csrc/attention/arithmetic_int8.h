// Attention's arithmetic in integers, for models whose products are int8 anyway:
//
//   scores   uint8 queries by int8 keys, each row with a scale of its own: with VNNI four times the rate of float32. Without it, both of
//            11 bits and sign in int16: twice.
//   values   probabilities of 13 bits by values of 10 bits and sign, one scale for a block of keys: twice the rate of float32. 8 bits
//            are not enough here: where one key takes most of the attention, the many small probabilities would become zeros.
//
// The softmax between them is float32, with an exponential that is right to the 13 bits.
#pragma once
#include "../gemm/microkernel.h"
#include "scratch.h"

#if HFCA_DOT_INT16
#include "softmax_approx.h"

namespace HFCA_TIER {

// How queries and keys are multiplied: integers up to `most`, `per_word` of them in a word, those of queries + `zero`. `flipped` turns that
// into the keys'. store(to, x) writes the words of per_word vectors.
#if HFCA_VNNI
struct ScoreWords {
  using Dot = DotInt8;
  static constexpr int per_word = 4;
  static constexpr float most = 127.0f, zero = 128.0f;
  static constexpr uint32_t flipped = 0x80808080u;
  static int64_t count(int64_t features) { return Dot::Words::count(features); }
  static void store(uint32_t* to, const Float (&x)[per_word]) { Simd::store_bytes(reinterpret_cast<uint8_t*>(to), x); }
};
#else
struct ScoreWords {
  using Dot = DotInt16;
  static constexpr int per_word = 2;
  static constexpr float most = 2047.0f, zero = 0.0f;
  static constexpr uint32_t flipped = 0;
  // Feature i of 2 * width shares its word with feature i + width.
  static int64_t count(int64_t features) { return round_up(features, 2 * Simd::width) / 2; }
  static void store(uint32_t* to, const Float (&x)[per_word]) { Simd::store_pairs(to, x[0], x[1]); }
};
#endif

class ArithmeticInt8 {
 public:
  static constexpr int rows_at_once = tile_rows;
  static constexpr int64_t most_features = 256;  // of a head

  ArithmeticInt8(const hfca::Attention& a, const hfca::AttentionTask& task, Carver& memory)
      : a_(a),
        task_(task),
        words_(Words::count(a.head_dim)),
        row_words_(padded_words(words_)),
        keys_(memory, key_block, words_),
        queries_(memory, task.row_end - task.row_begin, row_words_) {
    values_ = memory.take<uint32_t>(key_block / 2 * round_up(a.value_dim, chunk));
    probabilities_ = memory.take<uint32_t>(tile_rows * key_block / 2);
  }

  void take_queries(int64_t row, int rows) const {
    int64_t at[tile_rows];
    locate_queries(a_, task_, row, rows, at);
    pack(a_.query, at, rows, queries_of(row));
  }

  void pack(const hfca::Heads& x, const int64_t* at, int rows, const PackedQueries& to) const {
    float step[Simd::width];
    with_type(x, [&](const auto* data) {
      quantize([&](int i) { return data + at[i]; }, a_.head_dim, rows, step,
               [&](int i, int64_t w) { return packed_word(to.data, rows, i, w); });
    });
    for (int i = 0; i < rows; ++i) to.scale[i] = step[i] * a_.scale;
  }

  void take_keys(int64_t begin, int64_t end) {
    const int64_t start = task_.batch * a_.key.batch_stride + task_.kv_head * a_.key.head_stride + begin * a_.key.position_stride;
    pack(a_.key, [&](int64_t k) { return start + k * a_.key.position_stride; }, end - begin, keys_);
    with_type(a_.value, [&](const auto* x) {
      pack_values(x + task_.batch * a_.value.batch_stride + task_.kv_head * a_.value.head_stride + begin * a_.value.position_stride,
                  end - begin);
    });
  }

  template <class At>
  void pack(const hfca::Heads& x, const At& at, int64_t count, const PackedKeys& to) const {
    for (int64_t k = 0; k < round_up(count, chunk); k += Simd::width) pack_keys(x, at, k, count, to);
  }

  void score(int64_t row, int rows, int64_t keys, float* scores) const { score(queries_of(row), rows, keys_, keys, scores); }

  const PackedKeys& keys() const { return keys_; }
  PackedQueries queries_of(int64_t row) const { return queries_.from(row - task_.row_begin); }

  void score(const PackedQueries& queries, int rows, const PackedKeys& packed, int64_t keys, float* scores) const {
    const auto multiply = multiply_of<ScoreWords::Dot>(rows);
    for (int64_t k = 0; k < keys; k += chunk, scores += rows * chunk) {
      const uint32_t* panel = packed.data + k * words_;
      multiply(queries.data, panel, words_, scores, {reinterpret_cast<const char*>(panel), 0});
      Float scale[vectors], offset[vectors];
      unroll<0, vectors>([&](auto v) HFCA_INLINE {
        scale[v] = Simd::load(packed.scale + k + v * Simd::width);
        offset[v] = Simd::load(packed.offset + k + v * Simd::width);
      });
      for (int i = 0; i < rows; ++i) {
        const Float step = Simd::set1(queries.scale[i]);
        unroll<0, vectors>([&](auto v) HFCA_INLINE {
          float* p = scores + i * chunk + v * Simd::width;
          Simd::store(p, Simd::mul(Simd::mul(Simd::sub(Simd::load(p), offset[v]), scale[v]), step));
        });
      }
    }
  }

  float exponentials(const float* scores, int rows, int i, int64_t visible, int64_t keys, float shift) const {
    return approx_exponentials(scores + i * chunk, static_cast<int64_t>(rows) * chunk, visible, keys, shift, most_probability_log2,
                               [&](int64_t key, auto v, Float low, Float high) HFCA_INLINE {
                                 Simd::store_pairs(probabilities_ + (key / chunk * rows + i) * packed_words + v * Simd::width, low, high);
                               });
  }

  void weigh(const float*, int rows, int64_t keys, float* sums, bool accumulate) const {
    const auto multiply = multiply_of<DotInt16>(rows);
    const Float scale = Simd::set1(value_scale_);
    for (int64_t d = 0; d < a_.value_dim; d += chunk, sums += rows * chunk) {
      alignas(64) float products[tile_rows * chunk];
      const uint32_t* panel = values_ + d * (key_block / 2);
      multiply(probabilities_, panel, round_up(keys, chunk) / 2, products, {reinterpret_cast<const char*>(panel), 0});
      for (int j = 0; j < rows * chunk; j += Simd::width) {
        const Float product = Simd::load(products + j);
        Simd::store(sums + j, accumulate ? Simd::fma(product, scale, Simd::load(sums + j)) : Simd::mul(product, scale));
      }
    }
  }

 private:
  using Words = ScoreWords;
  using Multiply = void (*)(const uint32_t*, const uint32_t*, int64_t, float*, hfca::Ahead);

  static constexpr int vectors = chunk / Simd::width;
  static constexpr float most_value = 1023.0f, most_probability_log2 = 13.0f;
  static_assert(Words::Dot::rows == tile_rows && DotInt16::rows == tile_rows && chunk == hfca::panel_columns && chunk == 2 * packed_words,
                "one shape of tiles");
  static_assert(key_block * 8193 * 1023 <= INT32_MAX, "sums of a block must fit");
  static_assert(most_features * 2047 * 2047 <= INT32_MAX, "sums of a head must fit");

  template <class Dot>
  static Multiply multiply_of(int rows) {
    switch (rows) {
#define HFCA_ROWS(R)                                        \
  case R:                                                   \
    if constexpr (R <= tile_rows) return &multiply<Dot, R>; \
    else break;
      // clang-format off
      HFCA_ROWS(1) HFCA_ROWS(2) HFCA_ROWS(3) HFCA_ROWS(4) HFCA_ROWS(5) HFCA_ROWS(6) HFCA_ROWS(7)
      HFCA_ROWS(8) HFCA_ROWS(9) HFCA_ROWS(10) HFCA_ROWS(11) HFCA_ROWS(12) HFCA_ROWS(13) HFCA_ROWS(14)
      // clang-format on
#undef HFCA_ROWS
    }
    return nullptr;
  }

  template <class F>
  static void with_type(const hfca::Heads& x, const F& f) {
    x.type == hfca::HeadType::bfloat16 ? f(static_cast<const uint16_t*>(x.data)) : f(static_cast<const float*>(x.data));
  }

  // Up to `width` rows of features as integers, round(x / step[i]) + zero. row(i): where row i begins; to(i, w): where its words from w on
  // go, up to a whole line.
  template <class Row, class To>
  static void quantize(const Row& row, int64_t features, int rows, float (&step)[Simd::width], const To& to) {
    static_assert(tile_rows <= Simd::width, "the rows of a tile are quantized together");
    Float magnitude[Simd::width];
    for (int i = 0; i < Simd::width; ++i) {
      magnitude[i] = Simd::zero();
      if (i < rows)
        for (int64_t d = 0; d < features; d += Simd::width)
          magnitude[i] = Simd::highest(magnitude[i], Simd::abs(load_padded(row(i), d, features)));
    }
    Simd::transpose(magnitude);
    for (int i = 1; i < Simd::width; ++i) magnitude[0] = Simd::highest(magnitude[0], magnitude[i]);
    float inverse[Simd::width];
    Simd::store(step, magnitude[0]);
    for (int i = 0; i < Simd::width; ++i) {
      inverse[i] = step[i] <= largest_float && step[i] > 1e-33f ? Words::most / step[i] : 0.0f;
      step[i] = step[i] <= largest_float ? step[i] * (1.0f / Words::most) : not_a_number;
    }
    for (int i = 0; i < rows; ++i) {
      const Float scale = Simd::set1(inverse[i]), zero = Simd::set1(Words::zero);
      for (int64_t w = 0; w < padded_words(Words::count(features)); w += Simd::width) {
        Float integers[Words::per_word];
        unroll<0, Words::per_word>([&](auto v) HFCA_INLINE {
          integers[v] = Simd::fma(load_padded(row(i), Words::per_word * w + v * Simd::width, features), scale, zero);
        });
        Words::store(to(i, w), integers);
      }
    }
  }

  // Keys [k, k + width), to [keys / 32][words][32]; those from `count` on are zeros.
  template <class At>
  void pack_keys(const hfca::Heads& x, const At& at, int64_t k, int64_t count, const PackedKeys& to) const {
    alignas(64) uint32_t rows[Simd::width * most_features / Words::per_word];
    const int keys = count - k < Simd::width ? count > k ? static_cast<int>(count - k) : 0 : Simd::width;
    float step[Simd::width];
    with_type(x, [&](const auto* data) {
      quantize([&](int i) { return data + at(k + i); }, a_.head_dim, keys, step,
               [&](int i, int64_t w) { return rows + i * row_words_ + w; });
    });
    for (int i = 0; i < Simd::width; ++i) to.scale[k + i] = step[i];
    if constexpr (Words::flipped != 0)
      for (int64_t w = 0; w < keys * row_words_; ++w) rows[w] ^= Words::flipped;
    for (int64_t w = keys * row_words_; w < Simd::width * row_words_; ++w) rows[w] = 0;
    uint32_t* panel = to.data + k / chunk * chunk * words_ + k % chunk;
    for (int64_t w = 0; w < words_; w += Simd::width) {
      Float block[Simd::width];
      unroll<0, Simd::width>([&](auto i) HFCA_INLINE { block[i] = Simd::load(reinterpret_cast<const float*>(rows + i * row_words_ + w)); });
      Simd::transpose(block);
      unroll<0, Simd::width>([&](auto i) HFCA_INLINE {
        if (w + i < words_) Simd::store(reinterpret_cast<float*>(panel + (w + i) * chunk), block[i]);
      });
    }
    Words::Dot::Acc sum = Words::Dot::zero();  // of what a query of zeros would be
    if constexpr (Words::flipped != 0)
      for (int64_t w = 0; w < words_; ++w)
        sum = Words::Dot::step(sum, Words::Dot::broadcast(&Words::flipped), Words::Dot::load(panel + w * chunk));
    Words::Dot::store(to.offset + k, sum);
  }

  // To [value_dim / 32][keys / 2][32]: keys j and j + 16 of 32 meet in a word, as store_pairs puts probabilities together.
  template <class T>
  void pack_values(const T* values, int64_t count) {
    const int64_t stride = a_.value.position_stride, features = a_.value_dim;
    Float magnitude = Simd::zero();
    for (int64_t k = 0; k < count; ++k)
      for (int64_t d = 0; d < features; d += Simd::width)
        magnitude = Simd::highest(magnitude, Simd::abs(load_padded(values + k * stride, d, features)));
    const float largest = Simd::reduce_highest(magnitude);
    value_scale_ = largest <= largest_float ? largest / most_value : not_a_number;
    const Float inverse = Simd::set1(largest <= largest_float && largest > 1e-33f ? most_value / largest : 0.0f);
    for (int64_t k = 0; k < count; k += chunk)
      for (int64_t j = k; j < k + packed_words; ++j) {
        const auto value = [&](int64_t key, int64_t d) HFCA_INLINE {
          return key < count ? Simd::mul(load_padded(values + key * stride, d, features), inverse) : Simd::zero();
        };
        uint32_t* out = values_ + (k / 2 + j - k) * chunk;
        for (int64_t d = 0; d < features; d += Simd::width)
          Simd::store_pairs(out + d / chunk * chunk * (key_block / 2) + d % chunk, value(j, d), value(j + packed_words, d));
      }
  }

  const hfca::Attention& a_;
  const hfca::AttentionTask& task_;
  int64_t words_, row_words_;  // of the features of a head
  PackedKeys keys_;
  PackedQueries queries_;
  uint32_t *values_, *probabilities_;
  float value_scale_ = 0.0f;
};

}  // namespace HFCA_TIER

#endif
