// int8 without VNNI. The sums of two products that vpmaddubsw adds in int16 would saturate with bytes that have no sign (255 * 127 * 2), so a
// packed byte is 128 less than what it stands for, -128 to 127, and its sign goes over to the weight:
//
//   byte * weight = magnitude * (weight ^ sign) + (sign ? magnitude : 0),   sign: all bits of a negative byte, else none
//
// since weight ^ -1 = -weight - 1. A sum of two is from -128 * 128 * 2 = -2^15 to 127 * 127 * 2 < 2^15. The last term knows nothing of
// weights: what a row has of it, its sums start with. Sums are the integers that VNNI gives.
//
// (SmolLM2's perplexity with inputs of 7 bits, which need no signs: 3 % above float32.) Per word of weights and row there is one instruction
// more than with 7 bits, an exclusive or, which runs where the multipliers do not. Measured on Zen 4, of the rate with 7 bits: 0.87;
// vpsignb, which runs on the multipliers, 0.59 to 0.64, weights widened to int16 0.81.
#pragma once
#include "microkernel.h"

namespace HFCA_TIER {

#if HFCA_WITHOUT_VNNI
// For each word of the weight a word of magnitudes and one of their signs; behind a tile, what the sums of its rows start with.
struct SignWords : DotInt8::Words {
  static int64_t count(int64_t k) { return 2 * DotInt8::Words::count(k); }
};

struct DotInt8Signs : DotInt8 {
  using Words = SignWords;
  struct Input {
    Weight magnitudes, signs;
  };
  static constexpr int rows = Simd::registers == 32 ? 12 : 5, step_words = 2;
  static Input broadcast(const uint32_t* p) { return {DotInt8::broadcast(p), DotInt8::broadcast(p + 1)}; }
#if defined(HFCA_SIMD_AVX512)
  static Acc start(uint32_t sum) { return _mm512_set1_epi32(static_cast<int>(sum)); }
  static Acc step(Acc acc, const Input& a, Weight b) {
    const Weight pairs = _mm512_maddubs_epi16(a.magnitudes, _mm512_xor_si512(b, a.signs));
    asm("vpaddd %1, %0, %0" : "+v"(acc) : "v"(_mm512_madd_epi16(pairs, _mm512_set1_epi16(1))));
    return acc;
  }
#else
  static Acc start(uint32_t sum) { return _mm256_set1_epi32(static_cast<int>(sum)); }
  static Acc step(Acc acc, const Input& a, Weight b) {
    const Weight pairs = _mm256_maddubs_epi16(a.magnitudes, _mm256_xor_si256(b, a.signs));
    asm("vpaddd %1, %0, %0" : "+x"(acc) : "x"(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1))));
    return acc;
  }
#endif
};

// A tile of rows that was packed in bytes, [lines][rows][16 words], as magnitudes and signs, [2 * lines][rows][8][2], and behind it the sum
// of the magnitudes of each row's negative ones, of the words that meet weights. In place, from the end on: a line is read before anything
// is written over it.
inline void part_signs(uint32_t* tile, int64_t words, int rows) {
  const int64_t lines = padded_words(words) / packed_words;
  __m256i sums[DotInt8Signs::rows] = {};
  const __m256i zero = _mm256_setzero_si256(), flip = _mm256_set1_epi8(-128);
  const auto first_words = [](int64_t n) HFCA_INLINE {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  };
  for (int64_t line = lines - 1; line >= 0; --line) {
    const int64_t left = words - line * packed_words;
    const __m256i met[] = {first_words(left), first_words(left - 8)};
    for (int i = rows - 1; i >= 0; --i) {
      const auto* const from = reinterpret_cast<const __m256i*>(tile + (line * rows + i) * packed_words);
      const __m256i halves[] = {_mm256_loadu_si256(from), _mm256_loadu_si256(from + 1)};
      unroll<0, 2>([&](auto half) HFCA_INLINE {
        const __m256i bytes = _mm256_xor_si256(halves[half], flip), signs = _mm256_cmpgt_epi8(zero, bytes);
        const __m256i magnitudes = _mm256_abs_epi8(bytes);
        sums[i] = _mm256_add_epi64(sums[i], _mm256_sad_epu8(_mm256_and_si256(magnitudes, _mm256_and_si256(signs, met[half])), zero));
        const __m256i low = _mm256_unpacklo_epi32(magnitudes, signs), high = _mm256_unpackhi_epi32(magnitudes, signs);
        auto* const to = reinterpret_cast<__m256i*>(tile + ((2 * line + half) * rows + i) * packed_words);
        _mm256_storeu_si256(to, _mm256_permute2x128_si256(low, high, 0x20));
        _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(low, high, 0x31));
      });
    }
  }
  uint32_t* const starts = tile + 2 * lines * rows * packed_words;
  for (int i = 0; i < rows; ++i) {
    alignas(32) uint64_t parts[4];
    _mm256_store_si256(reinterpret_cast<__m256i*>(parts), sums[i]);
    starts[i] = static_cast<uint32_t>(parts[0] + parts[1] + parts[2] + parts[3]);
  }
}

struct SignsGemm : TierGemm<DotInt8Signs> {
  template <void (*pack_bytes)(const Gemm&, int64_t, int)>
  static void pack(const Gemm& g, int64_t row, int rows) {
    pack_bytes(g, row, rows);
    part_signs(g.words + row * g.input_words, DotInt8::Words::count(g.k), rows);
  }
  static void pack_tiles(const Gemm& g, const hfca::WinogradRows& tiles, int64_t row, int rows) {
    pack_winograd<DotInt8::Words, true>(g, tiles, row, rows);
    for (int position = 0; position < hfca::tile_positions; ++position)
      part_signs(g.words + row * g.input_words + position * tiles.words_apart, DotInt8::Words::count(g.k), rows);
  }

  static constexpr hfca::GemmKernels kernels() {
    hfca::GemmKernels k = TierGemm::kernels();
    k.pack_rows = &pack<&DotInt8::Words::pack>, k.pack_winograd = &pack_tiles;
    return k;
  }
  static constexpr hfca::GemmKernels kernels_of_words() {
    hfca::GemmKernels k = TierGemm::kernels_of_words();
    k.pack_rows = &pack<&pack_image_rows>;
    return k;
  }
};

using Int8Gemm = SignsGemm;
#else
using Int8Gemm = TierGemm<DotInt8>;
#endif

}  // namespace HFCA_TIER
