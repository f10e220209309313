// GEMMs by ARM's products of small matrices (smmla, bfmmla): 2 rows x 8 bytes or 4 bfloat16, times 2 columns of as many, in one
// instruction, which is twice what a dot product does.
//
// Weights are packed as for dot products: the words of two columns are brought together from two rows of a panel as they are loaded
// (zip), which takes one instruction for each operand and pays off from four input rows on. Products and zips share their pipes: with
// 12 rows there are 24 for 4, so 86 % of the peak is the most there can be, and with 5 or 6 rows 24 for 8, 75 %. Rows of the input lie in
// pairs, [k_words / 16][rows / 2][8][2 rows][2 words], so that an operand of theirs is one load; the last of an odd number lies alone.
#pragma once
#include "../kernels.h"
#include "int4.h"
#include "microkernel.h"

#if defined(HFCA_SIMD_NEON) && defined(__ARM_FEATURE_MATMUL_INT8) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define HFCA_MMLA 1

namespace HFCA_TIER {

struct MmlaInt8 {
  using Dot = DotInt8;
  static constexpr int depth = 8;
  static void step(int32x4_t& acc, int32x4_t rows, int32x4_t columns) {
    asm volatile("smmla %0.4s, %1.16b, %2.16b" : "+w"(acc) : "w"(rows), "w"(columns));  // see DotInt8::step
  }
  static float32x4_t sums(int32x4_t acc) { return vcvtq_f32_s32(acc); }
};

struct MmlaBf16 {
  using Dot = DotBf16;
  static constexpr int depth = 4;
  static void step(int32x4_t& acc, int32x4_t rows, int32x4_t columns) {
    asm volatile("bfmmla %0.4s, %1.8h, %2.8h" : "+w"(acc) : "w"(rows), "w"(columns));
  }
  static float32x4_t sums(int32x4_t acc) { return vreinterpretq_f32_s32(acc); }
};

// Two rows that were packed one by one become a pair, line by line.
inline void pair_rows(uint32_t* tile, int64_t lines, int rows) {
  for (int64_t line = 0; line < lines; ++line, tile += rows * packed_words)
    for (int i = 0; i + 2 <= rows; i += 2) {
      uint64_t *const first = reinterpret_cast<uint64_t*>(tile + i * packed_words), *const second = first + packed_words / 2;
      uint64x2_t a[4], b[4];
      unroll<0, 4>([&](auto q) HFCA_INLINE { a[q] = vld1q_u64(first + 2 * q), b[q] = vld1q_u64(second + 2 * q); });
      unroll<0, 4>([&](auto q) HFCA_INLINE {
        vst1q_u64(first + 4 * q, vzip1q_u64(a[q], b[q]));
        vst1q_u64(first + 4 * q + 2, vzip2q_u64(a[q], b[q]));
      });
    }
}

// sums[rows][panel_columns] = beginning + input @ one weight panel, as multiply_from.
template <class Mmla, int rows>
inline void multiply_pairs(const Chain& chain, const uint32_t* __restrict input, const uint32_t* __restrict weight, int64_t words,
                           float* sums, hfca::Ahead ahead) {
  constexpr int pairs = (rows + 1) / 2;
  // 24 sums at most, and two operands for every four columns. Few pairs leave room for more columns, which share the rows' loads.
  constexpr int fours = pairs <= 3 ? 4 : 2, columns = 4 * fours, passes = hfca::panel_columns / columns;
  const bool along = ahead.step == hfca::panel_columns * 4;
  if (!along) ahead.step /= passes;
  for (int column = 0; column < hfca::panel_columns; column += columns) {
    int32x4_t acc[pairs][2 * fours];
    unroll<0, pairs * 2 * fours>([&](auto i) HFCA_INLINE { acc[i / (2 * fours)][i % (2 * fours)] = vdupq_n_s32(0); });
    if (chain.before)
      unroll<0, pairs * fours>([&](auto i) HFCA_INLINE {
        constexpr int p = decltype(i)::number / fours, f = decltype(i)::number % fours;
        const float* const at = chain.before + 2 * p * hfca::panel_columns + column + 4 * f;
        const float64x2_t first = load_bits<float64x2_t>(at);
        float64x2_t second = vdupq_n_f64(0.0);
        if constexpr (2 * p + 1 < rows) second = load_bits<float64x2_t>(at + hfca::panel_columns);
        acc[p][2 * f] = vreinterpretq_s32_f64(vzip1q_f64(first, second));
        acc[p][2 * f + 1] = vreinterpretq_s32_f64(vzip2q_f64(first, second));
      });
    const uint32_t *a = input, *alone = nullptr, *b = weight + column;  // alone: the last row of an odd number
    const auto step = [&](auto whole) HFCA_INLINE {  // two words, or the last one alone
      const auto row_pair = [&](auto p) HFCA_INLINE {
        [[maybe_unused]] const auto* at = reinterpret_cast<const int32_t*>(a + p * 2 * packed_words);
        if constexpr (2 * p.number + 1 < rows) return in_order(vld1q_s32(at));
        else return in_order(vcombine_s32(vld1_s32(reinterpret_cast<const int32_t*>(alone)), vdup_n_s32(0)));
      };
      // The two operands of four columns, one of each two.
      const auto column_pairs = [&](auto f, int32x4_t(&to)[2]) HFCA_INLINE {
        const auto* at = reinterpret_cast<const int32_t*>(b + 4 * f);
        const int32x4_t first = in_order(vld1q_s32(at)), second = whole ? in_order(vld1q_s32(at + hfca::panel_columns)) : vdupq_n_s32(0);
        to[0] = in_order(vzip1q_s32(first, second)), to[1] = in_order(vzip2q_s32(first, second));
      };
      // Which side stays in registers and which is loaded one by one: the smaller one stays.
      if constexpr (pairs <= 3) {
        int32x4_t x[pairs];
        unroll<0, pairs>([&](auto p) HFCA_INLINE { x[p] = row_pair(p); });
        unroll<0, fours>([&](auto f) HFCA_INLINE {
          int32x4_t y[2];
          column_pairs(f, y);
          unroll<0, pairs>([&](auto p) HFCA_INLINE {
            Mmla::step(acc[p][2 * f], x[p], y[0]);
            Mmla::step(acc[p][2 * f + 1], x[p], y[1]);
          });
        });
      } else {
        int32x4_t y[fours][2];
        unroll<0, fours>([&](auto f) HFCA_INLINE { column_pairs(f, y[f]); });
        unroll<0, pairs>([&](auto p) HFCA_INLINE {
          const int32x4_t x = row_pair(p);
          unroll<0, 2 * fours>([&](auto i) HFCA_INLINE { Mmla::step(acc[p][i], x, y[i / 2][i % 2]); });
        });
      }
      b += 2 * hfca::panel_columns;
    };
    for (int64_t left = words; left > 0; left -= packed_words, a += (rows - 1) * packed_words) {
      const int here = left < packed_words ? static_cast<int>(left) : packed_words;
      const uint32_t* const line = a;
      alone = line + (rows - 1) * packed_words;
      for (int w = 0; w + 2 <= here; w += 2) {
        // See multiply(): harmless where it points nowhere.
        __builtin_prefetch(ahead.weight, 0, 2);
        if (along) {
          unroll<1, 4>([&](auto i) HFCA_INLINE { __builtin_prefetch(ahead.weight + 64 * i, 0, 2); });
          unroll<0, 4>([&](auto i) HFCA_INLINE { __builtin_prefetch(ahead.weight + hfca::near_bytes - hfca::far_bytes + 64 * i, 0, 3); });
        }
        ahead.weight += 2 * ahead.step;
        step(Index<1>{});
        a += 4, alone += 2;
      }
      if (here % 2) step(Index<0>{});
      a = line + packed_words;
    }
    unroll<0, rows>([&](auto i) HFCA_INLINE {
      unroll<0, fours>([&](auto f) HFCA_INLINE {
        const float64x2_t low = vreinterpretq_f64_s32(acc[i / 2][2 * f]), high = vreinterpretq_f64_s32(acc[i / 2][2 * f + 1]);
        const int32x4_t sum = vreinterpretq_s32_f64(i % 2 ? vzip2q_f64(low, high) : vzip1q_f64(low, high));
        float* const to = sums + i * hfca::panel_columns + column + 4 * f;
        chain.last ? vst1q_f32(to, Mmla::sums(sum)) : store_bits(to, sum);
      });
    });
  }
}

template <class Mmla>
struct MmlaGemm : TierGemm<typename Mmla::Dot> {
  using Dot = typename Mmla::Dot;
  using Base = TierGemm<Dot>;
  static constexpr int tile_rows = 12;
  static constexpr int64_t most_dot_rows = 3;  // of what dot products multiply as fast

  template <void (*pack_plain)(const Gemm&, int64_t, int)>
  static void pack(const Gemm& g, int64_t row, int rows) {
    pack_plain(g, row, rows);
    pair_rows(g.words + row * g.input_words, g.input_words / packed_words, rows);
  }
  static void pack_tiles(const Gemm& g, const hfca::WinogradRows& tiles, int64_t row, int rows) {
    pack_winograd<typename Dot::Words, Base::quantized>(g, tiles, row, rows);
    for (int position = 0; position < hfca::tile_positions; ++position)
      pair_rows(g.words + row * g.input_words + position * tiles.words_apart, g.input_words / packed_words, rows);
  }

  // As that of the base.
  template <int rows>
  static void tile(const Gemm& g, int64_t row, int64_t panel, const uint32_t* weight, hfca::Ahead ahead, const hfca::Part& part) {
    alignas(64) float tile_sums[rows * hfca::panel_columns];
    float* const sums = part.last ? tile_sums : part.sums;
    const int64_t column = panel * hfca::panel_columns, left = g.n - column, all = Base::weight_words(g), end = part.last ? all : part.end;
    const Chain chain{nullptr, part.begin > 0 ? part.sums : nullptr, end >= all};
    multiply_pairs<Mmla, rows>(chain, g.words + row * g.input_words + part.begin * rows, weight, end - part.begin, sums, ahead);
    if (!part.last) return;
    finish<Base::quantized>(g, sums, row, rows, column, left < hfca::panel_columns ? static_cast<int>(left) : hfca::panel_columns);
  }

  static void compute(const Gemm& g, int64_t row, int rows, int64_t panel, const void* weight, hfca::Ahead ahead, hfca::Part part) {
    const auto* words = static_cast<const uint32_t*>(weight);
    switch (rows) {
#define HFCA_ROWS(R) \
  case R: return tile<R>(g, row, panel, words, ahead, part);
      HFCA_ROWS(1)
      HFCA_ROWS(2)
      HFCA_ROWS(3) HFCA_ROWS(4) HFCA_ROWS(5) HFCA_ROWS(6) HFCA_ROWS(7) HFCA_ROWS(8) HFCA_ROWS(9) HFCA_ROWS(10) HFCA_ROWS(11) HFCA_ROWS(12)
#undef HFCA_ROWS
    }
  }

  static constexpr hfca::GemmKernels kernels() { return by_pairs(Base::kernels(), &pack<&Dot::Words::pack>, &pack_tiles); }
  static constexpr hfca::GemmKernels kernels_of_words() { return by_pairs(Base::kernels_of_words(), &pack<&pack_image_rows>, nullptr); }
  static constexpr hfca::GemmKernels kernels_of_int4() { return by_pairs(Int4Gemm::unpacked_kernels(), &pack<&Dot::Words::pack>, nullptr); }

 private:
  static constexpr hfca::GemmKernels by_pairs(hfca::GemmKernels k, void (*pack)(const Gemm&, int64_t, int),
                                              void (*pack_winograd)(const Gemm&, const hfca::WinogradRows&, int64_t, int)) {
    k.tile_rows = tile_rows, k.row_unit = 2, k.pack_rows = pack, k.compute = &compute, k.pack_winograd = pack_winograd;
    return k;
  }
};

// Many rows of the kinds that have such products. Those of integers are the same; bfmmla adds four bfloat16 products at a time and bfdot
// two, so that the results of bfloat16 rows differ in their last bits between GEMMs of up to `drafted` rows and of more.
constexpr hfca::Kernels with_pairs(hfca::Kernels k) {
  const auto take = [&](hfca::WeightKind kind, const hfca::GemmKernels& pairs, int64_t most_others) {
    k.gemm[static_cast<int>(kind)].most_rows = most_others;
    k.gemm_of_many_rows[static_cast<int>(kind)] = pairs;
  };
  using Bytes = MmlaGemm<MmlaInt8>;
  constexpr int64_t drafted = 16;  // tokens that are to get the sums of one alone
  take(hfca::WeightKind::bfloat16, MmlaGemm<MmlaBf16>::kernels(), drafted);
  take(hfca::WeightKind::int8, Bytes::kernels(), Bytes::most_dot_rows);
  take(hfca::WeightKind::int8_image, Bytes::kernels_of_words(), Bytes::most_dot_rows);
  take(hfca::WeightKind::int4, Bytes::kernels_of_int4(), Int4Gemm::most_rows);
  return k;
}

}  // namespace HFCA_TIER
#endif
