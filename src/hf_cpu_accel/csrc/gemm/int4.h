// Four-bit weights. packing/int4.py defines them:
//
//   weight = scale of the output feature * multiplier of the group * level,   |multiplier * level| <= 120
//
// Input and epilogue are those of int8. A panel is [groups][32 multipliers, then 128 bytes for every two words of input features: the
// level of the first word in the low half of a byte, that of the second one in the high half]. Few rows multiply levels as they are
// unpacked in registers, and the sums of 32 input features by their multiplier: weights come at the speed of memory, and there are half
// as many bytes of them as of int8. For many rows a panel is unpacked to int8 weights once, and stays in L2 while the rows pass by.
// Both give the same integers.
#pragma once
#include <cstring>

#include "signs.h"

namespace HFCA_TIER {

// The levels of 4 * Simd::width weights and more, one byte each, and what is done with them.
struct Levels {
  DotInt8::Weight first, second;  // words
};

alignas(16) constexpr int8_t level_table[16] = {-10, -8, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 7, 9};

#if defined(HFCA_SIMD_AVX512)
inline Levels load_levels(const uint8_t* p) {
  const __m512i table = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(level_table)));
  const __m512i packed = _mm512_loadu_si512(p), half = _mm512_set1_epi8(15);
  return {_mm512_shuffle_epi8(table, _mm512_and_si512(packed, half)),
          _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(packed, 4), half))};
}
inline Simd::Int load_multipliers(const uint8_t* p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline Simd::Int both_halves(Simd::Int m) {
  return _mm512_or_si512(_mm512_slli_epi32(m, 16), _mm512_and_si512(m, _mm512_set1_epi32(0xFFFF)));
}
// Bytes times m, which has the multiplier in both halves of each lane.
inline Simd::Int multiply_bytes(Simd::Int bytes, Simd::Int m) {
  const __m512i high = _mm512_set1_epi16(static_cast<int16_t>(0xFF00));
  return _mm512_ternarylogic_epi32(high, _mm512_mullo_epi16(_mm512_and_si512(bytes, high), m), _mm512_mullo_epi16(bytes, m), 0xCA);
}
#elif defined(HFCA_SIMD_AVX2)
inline Levels load_levels(const uint8_t* p) {
  const __m256i table = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(level_table)));
  const __m256i packed = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), half = _mm256_set1_epi8(15);
  return {_mm256_shuffle_epi8(table, _mm256_and_si256(packed, half)),
          _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(packed, 4), half))};
}
inline Simd::Int load_multipliers(const uint8_t* p) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))); }
inline Simd::Int both_halves(Simd::Int m) {
  return _mm256_or_si256(_mm256_slli_epi32(m, 16), _mm256_and_si256(m, _mm256_set1_epi32(0xFFFF)));
}
inline Simd::Int multiply_bytes(Simd::Int bytes, Simd::Int m) {
  const __m256i high = _mm256_set1_epi16(static_cast<int16_t>(0xFF00));
  const __m256i odd = _mm256_mullo_epi16(_mm256_and_si256(bytes, high), m), even = _mm256_mullo_epi16(bytes, m);
  return _mm256_or_si256(odd, _mm256_andnot_si256(high, even));
}
#elif defined(HFCA_SIMD_NEON)
inline Levels load_levels(const uint8_t* p) {
  const int8x16_t table = vld1q_s8(level_table);
  const auto load = [](const uint8_t* at) HFCA_INLINE { return vreinterpretq_u8_s32(in_order(vreinterpretq_s32_u8(vld1q_u8(at)))); };
  const uint8x16_t low = load(p), high = load(p + 16), half = vdupq_n_u8(15);
  const auto levels = [&](uint8x16_t index) HFCA_INLINE { return in_order(vreinterpretq_s32_s8(vqtbl1q_s8(table, index))); };
  return {{levels(vandq_u8(low, half)), levels(vandq_u8(high, half))}, {levels(vshrq_n_u8(low, 4)), levels(vshrq_n_u8(high, 4))}};
}
inline Simd::Int load_multipliers(const uint8_t* p) { return Simd::load_bytes(reinterpret_cast<const int8_t*>(p)); }
// In all bytes: there is a product of bytes here.
inline Simd::Int both_halves(Simd::Int m) {
  const auto spread = [](int32x4_t x) { return vmulq_s32(vandq_s32(x, vdupq_n_s32(0xFF)), vdupq_n_s32(0x01010101)); };
  return {spread(m.low), spread(m.high)};
}
inline Simd::Int multiply_bytes(Simd::Int bytes, Simd::Int m) {
  const auto product = [](int32x4_t a, int32x4_t b) {
    return vreinterpretq_s32_s8(vmulq_s8(vreinterpretq_s8_s32(a), vreinterpretq_s8_s32(b)));
  };
  return {product(bytes.low, m.low), product(bytes.high, m.high)};
}
#else
typedef int8_t SignedBytes __attribute__((vector_size(32)));
typedef uint8_t Bytes __attribute__((vector_size(32)));
// The levels of level_table: beyond 5 and -6 they are two apart.
inline Simd::Int level_of(Bytes half) {
  const SignedBytes q = reinterpret_cast<SignedBytes>(half) - 8, up = 2 * q - 5, down = 2 * q + 6, above = q > up ? q : up;
  return reinterpret_cast<Simd::Int>(above < down ? above : down);
}
inline Levels load_levels(const uint8_t* p) {
  Bytes packed;
  std::memcpy(&packed, p, sizeof(packed));
  return {level_of(packed & 15), level_of(packed >> 4)};
}
inline Simd::Int load_multipliers(const uint8_t* p) {
  Simd::Int m;
  for (int i = 0; i < Simd::width; ++i) m[i] = static_cast<int8_t>(p[i]);  // NOLINT(bugprone-signed-char-misuse): they have a sign
  return m;
}
// In all bytes: there is a product of bytes here. Unsigned, since a negative multiplier fills the highest byte.
inline Simd::Int both_halves(Simd::Int m) {
  typedef uint32_t Unsigned __attribute__((vector_size(sizeof(Simd::Int))));
  return reinterpret_cast<Simd::Int>((reinterpret_cast<Unsigned>(m) & 0xFFu) * 0x01010101u);
}
inline Simd::Int multiply_bytes(Simd::Int bytes, Simd::Int m) {
  return reinterpret_cast<Simd::Int>(reinterpret_cast<Bytes>(bytes) * reinterpret_cast<Bytes>(m));
}
#endif

// Sums over `words` words of input. Without VNNI these fit into the int16 pairs of vpmaddubsw, since levels are small: 4 * 2 * 255 * 10 < 2^15.
#if defined(HFCA_SIMD_AVX512) && HFCA_WITHOUT_VNNI
struct BlockSum {
  static constexpr int words = 4;
  static Simd::Int step(Simd::Int sum, Simd::Int input, Simd::Int levels) {
    return _mm512_add_epi16(sum, _mm512_maddubs_epi16(input, levels));
  }
  static Simd::Int multiplier(const uint8_t* p) { return both_halves(load_multipliers(p)); }
  static Simd::Int times(Simd::Int sum, Simd::Int m) { return _mm512_madd_epi16(sum, m); }
};
#elif HFCA_WITHOUT_VNNI
struct BlockSum {
  static constexpr int words = 4;
  static Simd::Int step(Simd::Int sum, Simd::Int input, Simd::Int levels) {
    return _mm256_add_epi16(sum, _mm256_maddubs_epi16(input, levels));
  }
  static Simd::Int multiplier(const uint8_t* p) { return both_halves(load_multipliers(p)); }
  static Simd::Int times(Simd::Int sum, Simd::Int m) { return _mm256_madd_epi16(sum, m); }
};
#else
struct BlockSum {
  static constexpr int words = 8;
  static Simd::Int step(Simd::Int sum, DotInt8::Input input, Simd::Int levels) {
    sum = DotInt8::step(sum, input, levels);
#if defined(HFCA_SIMD_NEON)
    sum = {in_order(sum.low), in_order(sum.high)};
#endif
    return sum;
  }
  static Simd::Int multiplier(const uint8_t* p) { return load_multipliers(p); }
#if defined(HFCA_SIMD_AVX512)
  static Simd::Int times(Simd::Int sum, Simd::Int m) { return _mm512_mullo_epi32(sum, m); }
#elif defined(HFCA_SIMD_AVX2)
  static Simd::Int times(Simd::Int sum, Simd::Int m) { return _mm256_mullo_epi32(sum, m); }
#elif defined(HFCA_SIMD_NEON)
  static Simd::Int times(Simd::Int sum, Simd::Int m) { return {vmulq_s32(sum.low, m.low), vmulq_s32(sum.high, m.high)}; }
#else
  static Simd::Int times(Simd::Int sum, Simd::Int m) { return sum * m; }
#endif
};
#endif

struct Int4Gemm {
  using Words = DotInt8::Words;
  static constexpr int tile_rows = Simd::registers == 32 ? 8 : 4;  // sums of a block, levels and the total of all columns fit the registers
  // Two tiles unpack levels twice, which takes less than unpacking a panel to int8 once. (8192 x 2048, 12 rows on Zen 4: 0.65 of the time;
  // 16 rows: 0.96. Tiles of four rows: 1.06 at 6 rows.)
  static constexpr int most_rows = tile_rows == 8 ? 14 : tile_rows;
  static constexpr int vectors = hfca::panel_columns / Simd::width;
  static constexpr int block = 32, block_words = block / 4, block_bytes = block * hfca::panel_columns / 2,
                       pair_bytes = 4 * hfca::panel_columns;
  static_assert(packed_words == 2 * block_words, "a line of the input is two blocks");
#if defined(HFCA_SIMD_NEON)
  static constexpr int most_chained = 0;  // sdot takes the last result's sum a cycle later
#else
  static constexpr int most_chained = 2;
#endif

  static int64_t groups(const Gemm& g) { return (g.k + g.group - 1) / g.group; }
  static int64_t input_words(const Gemm& g) { return padded_words(groups(g) * g.group / 4); }
  static int64_t panel_bytes(const Gemm& g) { return groups(g) * hfca::panel_columns * (1 + g.group / 2); }

  // See far_bytes.
  HFCA_INLINE static void ask(const uint8_t* p) {
    __builtin_prefetch(p + hfca::far_bytes, 0, 2);
    __builtin_prefetch(p + hfca::near_bytes, 0, 3);
  }

  // What sums begin with. Levels need no signs.h: bytes are multiplied as what they stand for, and the rest of packed_less is subtracted
  // here, so that float32 sees the integers of many rows.
  static Simd::Int start([[maybe_unused]] const Gemm& g, [[maybe_unused]] int64_t column) {
#if HFCA_WITHOUT_VNNI
    const int64_t left = g.n - column;
    const int lanes = left > Simd::width ? Simd::width : left > 0 ? static_cast<int>(left) : 0;
    return Simd::to_int(Simd::mul(Simd::load_n(g.weight_sum + column, lanes), Simd::set1(-packed_less)));
#else
    return DotInt8::zero();
#endif
  }

  // sums[rows][panel_columns] = input @ one panel, whose first output feature is `column`.
  template <int rows>
  static void multiply(const Gemm& g, const uint32_t* __restrict input, const uint8_t* __restrict weight, int64_t column,
                       float* __restrict sums) {
    constexpr int chains = rows <= most_chained ? 2 : 1;  // few rows leave the multipliers waiting for their own last result
    constexpr int sums_of_block = block_words / chains > BlockSum::words ? 2 : 1, pairs = block_words / 2 / sums_of_block;
    constexpr int together = 2, sums_together = together * rows;  // columns, in vectors, that share a broadcast
    Simd::Int total[vectors * rows];
    unroll<0, vectors>([&](auto v) HFCA_INLINE {
      const Simd::Int first = start(g, column + v * Simd::width);
      unroll<0, rows>([&](auto i) HFCA_INLINE { total[v * rows + i] = first; });
    });
    int64_t to_next = block_words;  // in this line of the input, then in the row's next one
    for (int64_t group = groups(g); group > 0; --group) {
      const uint8_t* levels = weight + hfca::panel_columns;
      ask(weight);
      for (int64_t left = g.group; left > 0; left -= block) {
        unroll<0, vectors / together * sums_of_block>([&](auto number) HFCA_INLINE {
          constexpr int part = number / sums_of_block, first_pair = number % sums_of_block * pairs;
          Simd::Int sum[chains][sums_together];
          unroll<0, chains * sums_together>([&](auto i) HFCA_INLINE { sum[i / sums_together][i % sums_together] = DotInt8::zero(); });
          unroll<first_pair, first_pair + pairs>([&](auto pair) HFCA_INLINE {
            Levels words[together];
            unroll<0, together>([&](auto v) HFCA_INLINE {
              const uint8_t* at = levels + pair * pair_bytes + (part * together + v) * Simd::width * 4;
              if (v * Simd::width * 4 % hfca::cache_line == 0) ask(at);
              words[v] = load_levels(at);
            });
            unroll<0, rows>([&](auto i) HFCA_INLINE {
              const auto x = DotInt8::broadcast(input + i * packed_words + 2 * pair);
              unroll<0, together>([&](auto v) HFCA_INLINE { step(sum[0][v * rows + i], x, words[v].first); });
            });
            unroll<0, rows>([&](auto i) HFCA_INLINE {
              const auto x = DotInt8::broadcast(input + i * packed_words + 2 * pair + 1);
              unroll<0, together>([&](auto v) HFCA_INLINE { step(sum[chains - 1][v * rows + i], x, words[v].second); });
            });
          });
          unroll<0, together>([&](auto v) HFCA_INLINE {
            const Simd::Int m = BlockSum::multiplier(weight + (part * together + v) * Simd::width);
            unroll<0, rows>([&](auto i) HFCA_INLINE {
              Simd::Int& to = total[(part * together + v) * rows + i];
              unroll<0, chains>([&](auto c) HFCA_INLINE { to = DotInt8::add(to, BlockSum::times(sum[c][v * rows + i], m)); });
            });
          });
        });
        input += to_next;
        to_next = rows * packed_words - to_next;
        levels += block_bytes;
      }
      weight = levels;
    }
    unroll<0, vectors * rows>(
        [&](auto i) HFCA_INLINE { DotInt8::store(sums + i % rows * hfca::panel_columns + i / rows * Simd::width, total[i]); });
  }

  template <int rows>
  static void tile(const Gemm& g, int64_t row, int64_t panel, const uint8_t* weight) {
    alignas(64) float sums[rows * hfca::panel_columns];
    const int64_t column = panel * hfca::panel_columns, left = g.n - column;
    multiply<rows>(g, g.words + row * g.input_words, weight, column, sums);
    finish<true>(g, sums, row, rows, column, left < hfca::panel_columns ? static_cast<int>(left) : hfca::panel_columns);
  }

  static void compute(const Gemm& g, int64_t row, int rows, int64_t panel, const void* weight, hfca::Ahead, hfca::Part) {
    const auto* bytes = static_cast<const uint8_t*>(weight);
    switch (rows) {
#define HFCA_ROWS(R)                                                    \
  case R:                                                               \
    if constexpr (R <= tile_rows) return tile<R>(g, row, panel, bytes); \
    else return;
      HFCA_ROWS(1) HFCA_ROWS(2) HFCA_ROWS(3) HFCA_ROWS(4) HFCA_ROWS(5) HFCA_ROWS(6) HFCA_ROWS(7) HFCA_ROWS(8)
#undef HFCA_ROWS
    }
  }

  // Words [begin, end) of one panel, in whole groups, as those of a panel of int8 weights.
  static void unpack(const Gemm& g, const void* panel, int64_t begin, int64_t end, void* unpacked) {
    const int64_t group_words = g.group / 4, first = begin / group_words, last = (end + group_words - 1) / group_words;
    const auto* weight = static_cast<const uint8_t*>(panel) + first * hfca::panel_columns * (1 + g.group / 2);
    auto* out = static_cast<float*>(unpacked);  // words pass as plain bits
    for (int64_t group = (last < groups(g) ? last : groups(g)) - first; group > 0; --group) {
      Simd::Int m[vectors];
      unroll<0, vectors>([&](auto v) HFCA_INLINE { m[v] = both_halves(load_multipliers(weight + v * Simd::width)); });
      weight += hfca::panel_columns;
      for (int64_t pair = g.group / 8; pair > 0; --pair, weight += pair_bytes, out += 2 * hfca::panel_columns)
        unroll<0, vectors>([&](auto v) HFCA_INLINE {
          const Levels words = load_levels(weight + v * Simd::width * 4);
          store_bits(out + v * Simd::width, multiply_bytes(words.first, m[v]));
          store_bits(out + hfca::panel_columns + v * Simd::width, multiply_bytes(words.second, m[v]));
        });
    }
  }

  static constexpr hfca::GemmKernels kernels() {
    hfca::GemmKernels k{tile_rows, 0, &input_words, &panel_bytes, &Words::pack, &compute};
    k.most_rows = most_rows;
    return k;
  }
  static constexpr hfca::GemmKernels unpacked_kernels() {
    constexpr hfca::GemmKernels whole = Int8Gemm::kernels();
    return {whole.tile_rows, 0, Int8Gemm::parted ? whole.input_words : &input_words, &panel_bytes, whole.pack_rows, whole.compute, &unpack};
  }

 private:
  template <class Input>
  HFCA_INLINE static void step(Simd::Int& sum, const Input& x, Simd::Int levels) {
    sum = BlockSum::step(sum, x, levels);
  }
};

}  // namespace HFCA_TIER
