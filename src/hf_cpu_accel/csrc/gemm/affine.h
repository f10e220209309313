// Weights in affine groups. packing/affine.py defines them:
//
//   weight[n, k] = scale[n, group of k] * q[n, k] + offset[n, group of k],   q without sign, of 4 or 8 bits
//
// which is what most quantized checkpoints hold, so that these can be computed as they are. Neither weights nor input are rotated. The
// input becomes integers of 16 bits with a scale for every line of 64 features:
//
//   integer = round(x / step) = radix * high + low,   high and low bytes with a sign
//
// so that the products of a block, the features that a group and a line share, are exact sums of integers:
//
//   output = sum over blocks of scale * step * (radix * sum(q * high) + sum(q * low)) + offset * sum(x)
//
// Without VNNI the integers stay whole, and the bytes of weights become int16 (DotInt8Widen).
//
// A panel is [groups][32 scales, 32 offsets, then 128 bytes for every word of input features, or, of 4 bits, for every two: the first one
// in the low half of a byte]. Any number of rows multiplies the bytes as they are unpacked in registers.
#pragma once
#include "affine_dot.h"
#include "half.h"

namespace HFCA_TIER {

// The packed input of a tile: [lines][rows][32 words] as AffineDot has them, then steps [lines][rows] and sums of x [blocks][rows].
struct AffineInput {
  static int64_t groups(const Gemm& g) { return (g.k + g.group - 1) / g.group; }
  static int64_t block(const Gemm& g) { return g.group < line_features ? g.group : line_features; }
  static int64_t blocks(const Gemm& g) { return groups(g) * (g.group / block(g)); }
  static int64_t lines(const Gemm& g) { return (blocks(g) * block(g) + line_features - 1) / line_features; }
  static int64_t words(const Gemm& g) { return 2 * packed_words * lines(g) + padded_words(lines(g) + blocks(g)); }

  static float* steps_of(const Gemm& g, uint32_t* tile, int rows) {
    return reinterpret_cast<float*>(tile + 2 * packed_words * lines(g) * rows);
  }

  static void pack(const Gemm& g, int64_t row, int rows) {
    uint32_t* const tile = g.words + row * g.input_words;
    float *const steps = steps_of(g, tile, rows), *const sums = steps + lines(g) * rows;
    each_row(g, row, rows, [&](int i, const auto* x) {
      for (int64_t line = 0; line < lines(g); ++line) {
        const int64_t at = line * line_features;
        alignas(64) float values[line_features];
        Range range;
        for (int j = 0; j < line_features; j += Simd::width) {
          const Simd::Float value = load_padded(x, at + j, g.k);
          Simd::store(values + j, value);
          range.add(value);
        }
        const float step = steps[line * rows + i] =
            store_line(values, range.magnitude(), packed_word(tile, 2 * rows, 2 * i, line * packed_words));
        const int size = static_cast<int>(block(g));
        for (int j = 0; j < line_features && at + j < blocks(g) * size; j += size)
          sums[(at + j) / size * rows + i] = step * sum_of(values + j, size);
      }
    });
  }

 private:
  // Writes a line and returns the step. The values become the integers: what a weight's offset is multiplied by has to be rounded as what
  // its q is, since the two are larger than the weight.
  static float store_line(float* values, float magnitude, uint32_t* to) {
    const bool finite = magnitude <= largest_float;
    const float step = magnitude / static_cast<float>(AffineDot::most), inverse = finite && step > 1e-35f ? 1.0f / step : 0.0f;
    for (int j = 0; j < line_features; j += Simd::width)
      Simd::store(values + j, Simd::round(Simd::mul(Simd::load(values + j), Simd::set1(inverse))));
    AffineDot::store(values, to);
    return !finite ? not_a_number : inverse > 0.0f ? step : 0.0f;  // smaller values count as zero
  }
  static float sum_of(const float* values, int size) {
    Simd::Float sum = Simd::load(values);
    for (int j = Simd::width; j < size; j += Simd::width) sum = Simd::add(sum, Simd::load(values + j));
    return Simd::reduce_add(sum);
  }
};

template <int bits>
struct AffineGemm {
  using Bytes = AffineBytes<bits>;
  // Both sums of a row and its total, two words of weights and a broadcast; of whole integers, what DotInt8Widen has.
  static constexpr int tile_rows = Simd::registers == 32 ? 6 : AffineDot::sums == 2 ? 3 : 5;
  static constexpr int vectors = hfca::panel_columns / Simd::width;
  static constexpr int unit_pairs = 2, unit_words = 2 * unit_pairs;  // groups are multiples of 16 features

  static int64_t header_bytes(const Gemm& g) { return 2 * hfca::panel_columns * (g.half_scales ? 2 : 4); }
  static int64_t group_bytes(const Gemm& g) { return header_bytes(g) + g.group / 8 * Bytes::pair_bytes; }
  static int64_t panel_bytes(const Gemm& g) { return AffineInput::groups(g) * group_bytes(g); }

  HFCA_INLINE static void ask(const uint8_t* p) {  // see far_bytes
    __builtin_prefetch(p + hfca::far_bytes, 0, 2);
    __builtin_prefetch(p + hfca::near_bytes, 0, 3);
  }

  // sums[rows][panel_columns] = input @ one panel. A function of its own: as a part of its callers it would spill sums on ARM.
  template <int rows, bool half_scales>
  __attribute__((noinline)) static void multiply(const Gemm& g, uint32_t* tile, const uint8_t* __restrict weight, float* __restrict sums) {
    constexpr int sums_of_row = AffineDot::sums,
                  together = sums_of_row == 1              ? (rows <= 2 ? vectors : 2)
                             : (rows <= 2 && vectors == 2) ? 2
                                                           : 1,
                  count = sums_of_row * rows * together;
    constexpr int chains = count < 6 ? 2 : 1;  // few rows leave the multipliers waiting for their own last result
    constexpr int scale_bytes = half_scales ? 2 : 4;
    const float* const steps = AffineInput::steps_of(g, tile, rows);
    const float* input_sums = steps + AffineInput::lines(g) * rows;
    const int64_t block = AffineInput::block(g), units = block / (4 * unit_words);
    Simd::Float total[vectors * rows];
    unroll<0, vectors * rows>([&](auto i) HFCA_INLINE { total[i] = Simd::zero(); });
    int64_t feature = 0;
    for (int64_t group = AffineInput::groups(g); group > 0; --group) {
      const uint8_t *const scales = weight, *const offsets = weight + scale_bytes * hfca::panel_columns;
      ask(scales);
      ask(offsets);
      weight += 2 * scale_bytes * hfca::panel_columns;
      for (int64_t left = g.group; left > 0; left -= block, feature += block, input_sums += rows) {
        const uint32_t* const input =
            tile + feature / line_features * 2 * rows * packed_words + feature % line_features / 4 * AffineDot::input_words;
        const float* const step = steps + feature / line_features * rows;
        unroll<0, vectors / together>([&](auto part) HFCA_INLINE {
          Simd::Int sum[chains][count];
          unroll<0, chains * count>([&](auto i) HFCA_INLINE { sum[i / count][i % count] = DotInt8::zero(); });
          for (int64_t unit = 0; unit < units; ++unit) {
            const uint8_t* const bytes = weight + unit * unit_pairs * Bytes::pair_bytes + part * together * Simd::width * 4;
            const uint32_t* const x = input + unit * unit_words * AffineDot::input_words;
            unroll<0, unit_pairs>([&](auto pair) HFCA_INLINE {
              Simd::Int first[together], second[together];
              unroll<0, together>([&](auto v) HFCA_INLINE {
                const uint8_t* const at = bytes + pair * Bytes::pair_bytes + v * Simd::width * 4;
                if constexpr (decltype(v)::number * Simd::width * 4 % hfca::cache_line == 0) {
                  ask(at);
                  if (bits == 8) ask(at + 4 * hfca::panel_columns);
                }
                const WordPair words = Bytes::load(at);
                first[v] = words.first, second[v] = words.second;
              });
              AffineDot::add<rows>(sum[0], first, x + 2 * pair * AffineDot::input_words);
              AffineDot::add<rows>(sum[chains - 1], second, x + (2 * pair + 1) * AffineDot::input_words);
            });
          }
          unroll<0, together>([&](auto v) HFCA_INLINE {
            constexpr int column_bytes = Simd::width * scale_bytes;
            const Simd::Float scale = load_scales<half_scales>(scales + (part * together + v) * column_bytes);
            Simd::Float offset = load_scales<half_scales>(offsets + (part * together + v) * column_bytes);
            if constexpr (Bytes::less_by != 0) offset = Simd::fma(scale, Simd::set1(Bytes::less_by), offset);
            unroll<0, rows>([&](auto i) HFCA_INLINE {
              Simd::Int of_row[sums_of_row];
              unroll<0, sums_of_row>([&](auto h) HFCA_INLINE {
                constexpr int at = (decltype(v)::number * rows + decltype(i)::number) * sums_of_row + decltype(h)::number;
                of_row[h] = sum[0][at];
                if constexpr (chains > 1) of_row[h] = DotInt8::add(of_row[h], sum[chains - 1][at]);
              });
              const Simd::Float product = AffineDot::total(of_row);
              Simd::Float& to = total[(part * together + v) * rows + i];
              to = Simd::fma(product, Simd::mul(scale, Simd::set1(step[i])), Simd::fma(offset, Simd::set1(input_sums[i]), to));
            });
          });
        });
        weight += block / 8 * Bytes::pair_bytes;
      }
    }
    unroll<0, vectors * rows>([&](auto i)
                                  HFCA_INLINE { Simd::store(sums + i % rows * hfca::panel_columns + i / rows * Simd::width, total[i]); });
  }

  template <int rows>
  static void tile(const Gemm& g, int64_t row, int64_t panel, const uint8_t* weight) {
    alignas(64) float sums[rows * hfca::panel_columns];
    const int64_t column = panel * hfca::panel_columns, left = g.n - column;
    uint32_t* const input = g.words + row * g.input_words;
    g.half_scales ? multiply<rows, true>(g, input, weight, sums) : multiply<rows, false>(g, input, weight, sums);
    finish<false>(g, sums, row, rows, column, left < hfca::panel_columns ? static_cast<int>(left) : hfca::panel_columns);
  }

  static void compute(const Gemm& g, int64_t row, int rows, int64_t panel, const void* weight, hfca::Ahead, hfca::Part) {
    const auto* bytes = static_cast<const uint8_t*>(weight);
    switch (rows) {
#define HFCA_ROWS(R)                                                    \
  case R:                                                               \
    if constexpr (R <= tile_rows) return tile<R>(g, row, panel, bytes); \
    else return;
      HFCA_ROWS(1) HFCA_ROWS(2) HFCA_ROWS(3) HFCA_ROWS(4) HFCA_ROWS(5) HFCA_ROWS(6)
#undef HFCA_ROWS
    }
  }

  static constexpr hfca::GemmKernels kernels() { return {tile_rows, 0, &AffineInput::words, &panel_bytes, &AffineInput::pack, &compute}; }

 private:
  template <bool half_scales>
  static Simd::Float load_scales(const uint8_t* p) {
    if constexpr (half_scales) return load_half(reinterpret_cast<const uint16_t*>(p));
    else return Simd::load(reinterpret_cast<const float*>(p));
  }
};

}  // namespace HFCA_TIER
