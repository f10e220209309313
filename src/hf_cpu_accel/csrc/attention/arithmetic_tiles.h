// Attention's arithmetic by AMX tiles: products of bfloat16 with float32 sums, 32 rows by 32 keys or features at a time. Products of queries
// and keys that are bfloat16 are exact, probabilities are rounded to 8 bits. Where a model's products are int8 anyway, queries, keys and
// values in float32 are rounded to bfloat16: the tiles are as fast for it as for bytes, which need scales.
#pragma once
#include <immintrin.h>

#include "../gemm/tile_gemm.h"
#include "flash.h"
#include "softmax_approx.h"

namespace HFCA_TIER {

class ArithmeticTiles {
 public:
  static constexpr int rows_at_once = tiles_rows;

  ArithmeticTiles(const hfca::Attention& a, const hfca::AttentionTask& task, Carver& memory)
      : a_(a),
        task_(task),
        row_words_(padded_words(Bf16Words::count(a.head_dim))),
        keys_(memory, key_block, row_words_),
        queries_(memory, task.row_end - task.row_begin, row_words_) {
    values_ = memory.take<uint32_t>(key_block / 2 * round_up(a.value_dim, chunk));
    probabilities_ = memory.take<uint32_t>(rows_at_once * key_block / 2);
  }

  void take_queries(int64_t row, int rows) const {
    int64_t at[rows_at_once];
    locate_queries(a_, task_, row, rows, at);
    pack(a_.query, at, rows, queries_of(row));
  }

  // To [words / 16][rows][16].
  void pack(const hfca::Heads& x, const int64_t* at, int rows, const PackedQueries& to) const {
    for (int i = 0; i < rows; ++i)
      for (int64_t w = 0; w < row_words_; w += packed_words) _mm512_storeu_si512(packed_word(to.data, rows, i, w), words_at(x, at[i], w));
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
      uint32_t* const columns = to.data + k / chunk * chunk * row_words_ + k % chunk;
      for (int64_t w = 0; w < row_words_; w += packed_words) {
        Float block[Simd::width];
        for (int i = 0; i < Simd::width; ++i) block[i] = k + i < count ? _mm512_castsi512_ps(words_at(x, at(k + i), w)) : Simd::zero();
        Simd::transpose(block);
        for (int i = 0; i < Simd::width; ++i) Simd::store(reinterpret_cast<float*>(columns + (w + i) * chunk), block[i]);
      }
    }
  }

  void score(int64_t row, int rows, int64_t keys, float* scores) const { score(queries_of(row), rows, keys_, keys, scores); }

  const PackedKeys& keys() const { return keys_; }
  PackedQueries queries_of(int64_t row) const { return queries_.from(row - task_.row_begin); }

  void score(const PackedQueries& queries, int rows, const PackedKeys& packed, int64_t keys, float* scores) const {
    const Float scale = Simd::set1(a_.scale);
    for (int64_t k = 0; k < keys; k += chunk, scores += rows * chunk) {
      multiply(queries.data, rows, packed.data + k * row_words_, row_words_, false, scores);
      for (int j = 0; j < rows * chunk; j += Simd::width) Simd::store(scores + j, Simd::mul(scale, Simd::load(scores + j)));
    }
  }

  float exponentials(const float* scores, int rows, int i, int64_t visible, int64_t keys, float shift) const {
    return approx_exponentials(scores + i * chunk, static_cast<int64_t>(rows) * chunk, visible, keys, shift, 0.0f,
                               [&](int64_t key, auto, Float low, Float high) HFCA_INLINE {
                                 auto* const to = reinterpret_cast<uint16_t*>(probabilities_ + (key / chunk * rows + i) * packed_words);
                                 Simd::store_bf16(to, low);
                                 Simd::store_bf16(to + Simd::width, high);
                               });
  }

  void weigh(const float*, int rows, int64_t keys, float* sums, bool accumulate) const {
    for (int64_t d = 0; d < a_.value_dim; d += chunk, sums += rows * chunk)
      multiply(probabilities_, rows, values_ + d * (key_block / 2), round_up(keys, chunk) / 2, accumulate, sums);
  }

 private:
  static_assert(chunk == 2 * packed_words && chunk == hfca::panel_columns && packed_words == Simd::width, "one shape of tiles");

  // sums[rows][32] (+)= left[words / 16][rows][16] @ right[words][32]
  static void multiply(const uint32_t* left, int rows, const uint32_t* right, int64_t words, bool accumulate, float* sums) {
    using Gemm = TileGemm<TileBf16>;
    TileWork& work = TileWork::mine();
    work.shape_for(rows);
    auto* const to = reinterpret_cast<uint32_t*>(sums);
    const Gemm::Product product{reinterpret_cast<const char*>(left), rows, right, words, accumulate ? to : nullptr, to};
    rows <= most_tile_rows ? Gemm::multiply<1, true>(work, product, {nullptr, 0}) : Gemm::multiply<2, true>(work, product, {nullptr, 0});
  }

  int64_t start_of(const hfca::Heads& x, int64_t position) const {
    return task_.batch * x.batch_stride + task_.kv_head * x.head_stride + position * x.position_stride;
  }

  // Features of x from element `at` on, of which `left` follow in the head: `width` of them, zeros behind the last.
  static __m256i halves_at(const hfca::Heads& x, int64_t at, int64_t left) {
    if (left <= 0) return _mm256_setzero_si256();
    if (x.type == hfca::HeadType::bfloat16) {
      const uint16_t* const halves = static_cast<const uint16_t*>(x.data) + at;
      return left >= Simd::width ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves))
                                 : _mm256_maskz_loadu_epi16(Simd::mask(static_cast<int>(left)), halves);
    }
    alignas(32) uint16_t halves[Simd::width];
    Simd::store_bf16(halves, Simd::load_n(static_cast<const float*>(x.data) + at, lanes(left)));
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(halves));
  }

  // Words [w, w + 16) of the head at element `at`, zeros behind its end.
  __m512i words_at(const hfca::Heads& x, int64_t at, int64_t w) const {
    const int64_t left = a_.head_dim - 2 * w;
    return _mm512_inserti64x4(_mm512_castsi256_si512(halves_at(x, at + 2 * w, left)),
                              halves_at(x, at + 2 * w + Simd::width, left - Simd::width), 1);
  }

  // To [value_dim / 32][keys / 2][32]: two keys meet in a word. The last chunk of keys is filled up with zeros.
  void pack_values(int64_t at, int64_t count) const {
    const int64_t stride = a_.value.position_stride;
    for (int64_t k = 0; k < round_up(count, chunk); k += 2, at += 2 * stride)
      for (int64_t d = 0; d < round_up(a_.value_dim, chunk); d += Simd::width) {
        const auto of = [&](int64_t key) {
          return _mm512_cvtepu16_epi32(k + key < count ? halves_at(a_.value, at + key * stride + d, a_.value_dim - d)
                                                       : _mm256_setzero_si256());
        };
        _mm512_storeu_si512(values_ + (d / chunk * (key_block / 2) + k / 2) * chunk + d % chunk,
                            _mm512_or_si512(of(0), _mm512_slli_epi32(of(1), 16)));
      }
  }

  const hfca::Attention& a_;
  const hfca::AttentionTask& task_;
  int64_t row_words_;  // of the features of a head
  PackedKeys keys_;
  PackedQueries queries_;
  uint32_t *values_, *probabilities_;
};

// Attention of the tier below, but for what tiles do: many rows whose numbers are bfloat16 or may be rounded to it.
struct TileAttention {
  static hfca::AttentionKernels& below() {
    static hfca::AttentionKernels kernels{};
    return kernels;
  }

  static bool takes(const hfca::Attention& a, int64_t rows) {
    const int64_t few = below().few_queries;
    return a.may_be_bfloat16() && ((rows > few && a.q_len > few) || a.positions) && !a.rows;
  }

  static int64_t scratch_floats(const hfca::Attention& a, int64_t rows) {
    const int64_t others = below().scratch_floats(a, rows), tiles = takes(a, rows) ? floats_of<ArithmeticTiles>(a, rows) : 0;
    return others > tiles ? others : tiles;
  }

  static void run(const hfca::Attention& a, const hfca::AttentionTask& task, float* scratch) {
    if (!takes(a, task.row_end - task.row_begin)) return below().run(a, task, scratch);
    TileWork::enter();
    attend<ArithmeticTiles>(a, task, scratch);
    TileWork::leave();
  }

  static int64_t position_floats(const hfca::Attention& a) {
    return takes(a, 0) ? position_floats_as<ArithmeticTiles>(a) : below().position_floats(a);
  }

  static void pack_positions(const hfca::Attention& a, int64_t head) {
    takes(a, 0) ? pack_positions_as<ArithmeticTiles>(a, head) : below().pack_positions(a, head);
  }

  static void use(hfca::AttentionKernels& kernels) {
    below() = kernels;
    kernels.tile_rows = ArithmeticTiles::rows_at_once;
    kernels.scratch_floats = &scratch_floats, kernels.run = &run;
    kernels.position_floats = &position_floats, kernels.pack_positions = &pack_positions;
  }
};

}  // namespace HFCA_TIER
