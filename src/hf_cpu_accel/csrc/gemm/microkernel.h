// The register tile: `rows` input rows by 32 weight columns, sums kept in registers over the whole of k.
//
// Why this shape: on a 512-bit tier 14 rows x 2 vectors are 28 accumulators; with 2 weight vectors and 1 broadcast that is 31 of 32
// registers, 28 multiplies per 16 loads. The weights stream from L2 (128 bytes per 28 multiplies), the packed input likewise.
//
// A row's results do not depend on the rows that it is multiplied with: a float32 sum is one chain of additions along k, or one for each
// section of a long k, for every number of rows and wherever k is cut into parts. Integers may be added in any order.
#pragma once
#include "../convolution/winograd_tiles.h"
#include "../simd/unroll.h"
#include "dot_int8.h"
#include "epilogue.h"

namespace HFCA_TIER {

// Sums as they are in registers, integers or float32: what the next part of k goes on from.
template <class Acc>
HFCA_INLINE inline Acc load_bits(const float* p) {
  Acc x;
  std::memcpy(&x, p, sizeof(x));
  return x;
}
template <class Acc>
HFCA_INLINE inline void store_bits(float* p, Acc x) {
  std::memcpy(p, &x, sizeof(x));
}

// What sums begin with and what they become.
struct Chain {
  const uint32_t* starts = nullptr;  // [rows]; null for zeros. signs.h has others
  const float* before = nullptr;     // the sums of the words before these, as bits; null at the first word
  bool last = true;                  // no words follow: integers become float32
  int64_t section = INT64_MAX;       // words of the weight in a section (gemm.h). A chain that is cut begins and ends with one
};

// sums[rows][panel_columns] = beginning + input @ one weight panel. `chain.before` may be `sums`. asks: for the weights of `ahead`.
template <class Dot, int rows, bool asks = true>
inline void multiply_from(const Chain& chain, const uint32_t* __restrict input, const uint32_t* __restrict weight, int64_t weight_words,
                          float* sums, hfca::Ahead ahead) {
  // So few rows are all there are (more would be dealt out to tiles of half the height or more) and wait for their weights: they take
  // all columns of a panel in one pass, as one stream.
  constexpr bool streaming = 2 * rows < Dot::rows;
  constexpr int vectors = streaming ? hfca::panel_columns / Simd::width : Dot::vectors, columns = vectors * Simd::width,
                tile = rows * vectors;
  // Few sums leave the multipliers waiting for their own last result: integers are cut into parts over interleaved words of k. 16 keep any
  // CPU busy (2 multipliers with a latency of 4 or 5); no more than a full tile has, where a stream's weights leave room for so many.
  constexpr int room = Dot::rows * Dot::vectors + Dot::vectors - vectors, parts = room < 16 ? room : 16,
                chains = __is_base_of(DotInt8, Dot) && tile < parts ? parts / tile : 1;
  constexpr int word_inputs = Dot::substeps * Dot::step_words,
                block = packed_words / word_inputs;  // words of the weight that meet the words of a row that lie side by side
  // A whole row of the panel per word runs along this panel; less is this tile's share of the next one, for all passes together.
  const bool along = ahead.step == hfca::panel_columns * 4;
  if (!along) ahead.step /= hfca::panel_columns / columns;
  const bool sectioned = !__is_base_of(DotInt8, Dot) && chain.section < INT64_MAX;
  for (int column = 0; column < hfca::panel_columns; column += columns) {
    const auto place = [&](int i) HFCA_INLINE { return i / vectors * hfca::panel_columns + column + i % vectors * Simd::width; };
    typename Dot::Acc acc[chains][tile];
    unroll<0, chains * tile>([&](auto i) HFCA_INLINE { acc[i / tile][i % tile] = Dot::zero(); });
    if constexpr (Dot::step_words == 2)
      if (chain.starts) unroll<0, tile>([&](auto i) HFCA_INLINE { acc[0][i] = Dot::start(chain.starts[i / vectors]); });
    const float* before = chain.before;
    if (before && !sectioned) unroll<0, tile>([&](auto i) HFCA_INLINE { acc[0][i] = load_bits<typename Dot::Acc>(before + place(i)); });
    const uint32_t *a = input, *b = weight + column;
    const uint32_t* soon = nullptr;  // a line of the input's next block, one after another: all of them are needed at once
    const auto step = [&](auto number) HFCA_INLINE {
      if constexpr (asks) {
        // Harmless where it points nowhere.
        __builtin_prefetch(ahead.weight, 0, 2);
        if (streaming || along) {
          __builtin_prefetch(ahead.weight + 64, 0, 2);
          __builtin_prefetch(ahead.weight + hfca::near_bytes - hfca::far_bytes, 0, 3);
          __builtin_prefetch(ahead.weight + hfca::near_bytes - hfca::far_bytes + 64, 0, 3);
        }
        ahead.weight += ahead.step;
      }
      typename Dot::Weight packed[vectors];
      unroll<0, vectors>([&](auto v) HFCA_INLINE { packed[v] = Dot::load(b + v * Simd::width); });
      unroll<0, Dot::substeps>([&](auto s) HFCA_INLINE {
        if constexpr (!streaming)
          unroll<0, Dot::step_words>([&](auto) HFCA_INLINE { __builtin_prefetch(soon, 0, 3), soon += packed_words; });
        unroll<0, rows>([&](auto i) HFCA_INLINE {
          const auto x = Dot::broadcast(a + i * packed_words + s * Dot::step_words);
          auto& sum = acc[number];
          unroll<0, vectors>([&](auto v)
                                 HFCA_INLINE { sum[i * vectors + v] = Dot::step(sum[i * vectors + v], x, Dot::widen(packed[v], s)); });
        });
      });
      a += word_inputs;
      b += hfca::panel_columns;
    };
    for (int64_t more = weight_words; more > 0;) {
      int64_t left = sectioned && more > chain.section ? chain.section : more;
      more -= left;
      for (; left > 0; left -= block, a += (rows - 1) * packed_words) {
        const int words = left < block ? static_cast<int>(left) : block;
        soon = a + rows * packed_words;
        int w = 0;
        for (; w + chains <= words; w += chains) unroll<0, chains>(step);
        if constexpr (chains > 1)
          for (; w < words; ++w) step(Index<0>{});
      }
      if constexpr (!__is_base_of(DotInt8, Dot)) {
        if (!sectioned) break;
        if (before)
          unroll<0, tile>([&](auto i) HFCA_INLINE { acc[0][i] = Dot::add(load_bits<typename Dot::Acc>(before + place(i)), acc[0][i]); });
        if (more == 0) break;
        unroll<0, tile>([&](auto i) HFCA_INLINE { store_bits(sums + place(i), acc[0][i]), acc[0][i] = Dot::zero(); });
        before = sums;
      }
    }
    if constexpr (chains > 1) {
      unroll<tile, chains * tile>([&](auto i) HFCA_INLINE { acc[0][i % tile] = Dot::add(acc[0][i % tile], acc[i / tile][i % tile]); });
    }
    if (chain.last) unroll<0, tile>([&](auto i) HFCA_INLINE { Dot::store(sums + place(i), acc[0][i]); });
    else unroll<0, tile>([&](auto i) HFCA_INLINE { store_bits(sums + place(i), acc[0][i]); });
  }
}

// The same from zeros.
template <class Dot, int rows>
inline void multiply(const uint32_t* __restrict input, const uint32_t* __restrict weight, int64_t weight_words, float* __restrict sums,
                     hfca::Ahead ahead = {nullptr, 0}) {
  multiply_from<Dot, rows>({}, input, weight, weight_words, sums, ahead);
}

template <class Dot>
struct TierGemm {
  using Dots = Dot;
  static constexpr bool quantized = __is_base_of(DotInt8, Dot), parted = Dot::step_words == 2;
  static constexpr int word_inputs = Dot::substeps * Dot::step_words;  // input words per weight word

  // Of a row, without what its sums start with, which is behind those of all rows of a tile.
  static int64_t row_words(const Gemm& g) { return padded_words(Dot::Words::count(g.k) / Dot::step_words) * Dot::step_words; }
  static int64_t input_words(const Gemm& g) { return row_words(g) + (parted ? packed_words : 0); }
  static int64_t weight_words(const Gemm& g) { return Dot::Words::count(g.k) / word_inputs; }
  static int64_t panel_bytes(const Gemm& g) { return weight_words(g) * hfca::panel_columns * 4; }

  template <int rows>
  static void tile(const Gemm& g, int64_t row, int64_t panel, const uint32_t* weight, hfca::Ahead ahead, const hfca::Part& part) {
    alignas(64) float tile_sums[rows * hfca::panel_columns];
    float* const sums = part.last ? tile_sums : part.sums;
    const int64_t column = panel * hfca::panel_columns, left = g.n - column, all = weight_words(g);
    const int64_t end = part.last ? all : part.end / word_inputs;
    const uint32_t* const input = g.words + row * g.input_words;
    const Chain chain{parted && part.begin == 0 ? input + row_words(g) * rows : nullptr, part.begin > 0 ? part.sums : nullptr, end >= all,
                      g.input_words > hfca::longest_chain ? hfca::section_words / word_inputs : INT64_MAX};
    multiply_from<Dot, rows>(chain, input + part.begin * rows, weight, end - part.begin / word_inputs, sums, ahead);
    if (!part.last) return;
    finish<quantized>(g, sums, row, rows, column, left < hfca::panel_columns ? static_cast<int>(left) : hfca::panel_columns);
  }

  static void compute(const Gemm& g, int64_t row, int rows, int64_t panel, const void* weight, hfca::Ahead ahead, hfca::Part part) {
    const auto* words = static_cast<const uint32_t*>(weight);
    switch (rows) {
#define HFCA_ROWS(R)                                                                 \
  case R:                                                                            \
    if constexpr (R <= Dot::rows) return tile<R>(g, row, panel, words, ahead, part); \
    else return;
      // clang-format off
      HFCA_ROWS(1) HFCA_ROWS(2) HFCA_ROWS(3) HFCA_ROWS(4) HFCA_ROWS(5) HFCA_ROWS(6) HFCA_ROWS(7)
      HFCA_ROWS(8) HFCA_ROWS(9) HFCA_ROWS(10) HFCA_ROWS(11) HFCA_ROWS(12) HFCA_ROWS(13) HFCA_ROWS(14)
      // clang-format on
#undef HFCA_ROWS
    }
  }

  static constexpr hfca::GemmKernels kernels() {
    return {Dot::rows,
            4 * hfca::panel_columns / word_inputs,
            &input_words,
            &panel_bytes,
            &Dot::Words::pack,
            &compute,
            nullptr,
            &pack_winograd<typename Dot::Words, quantized>,
            Dot::Words::run_elements};
  }
  // The same of rows that are words already.
  static constexpr hfca::GemmKernels kernels_of_words() {
    return {
        Dot::rows,       4 * hfca::panel_columns / word_inputs, &input_words, &panel_bytes, &pack_image_rows, &compute, nullptr, nullptr,
        packed_words * 4};
  }
};

}  // namespace HFCA_TIER
