// The two ends of Winograd's convolution, B^T tile B and A^T sums A.
#pragma once
#include "../gemm/epilogue.h"
#include "winograd.h"

namespace HFCA_TIER {

// B^T of four vectors.
HFCA_INLINE inline void tile_differences(const Simd::Float (&x)[4], Simd::Float (&to)[4]) {
  to[0] = Simd::sub(x[0], x[2]), to[1] = Simd::add(x[1], x[2]), to[2] = Simd::sub(x[2], x[1]), to[3] = Simd::sub(x[1], x[3]);
}

// store(position, channel, B^T tile B from that channel on) for all k channels of a tile, pixels[position] the first of each pixel.
template <class Load, class Store>
HFCA_INLINE inline void transform_tile(const void* const* pixels, int64_t k, const Load& load, const Store& store) {
  for (int64_t c = 0; c < k; c += Simd::width) {
    Simd::Float halfway[hfca::tile_side][hfca::tile_side];  // [column][row]
    unroll<0, hfca::tile_side>([&](auto column) HFCA_INLINE {
      Simd::Float x[hfca::tile_side];
      unroll<0, hfca::tile_side>([&](auto y) HFCA_INLINE { x[y] = load(pixels[y * hfca::tile_side + column], c); });
      tile_differences(x, halfway[column]);
    });
    unroll<0, hfca::tile_side>([&](auto y) HFCA_INLINE {
      const Simd::Float line[] = {halfway[0][y], halfway[1][y], halfway[2][y], halfway[3][y]};
      Simd::Float value[hfca::tile_side];
      tile_differences(line, value);
      unroll<0, hfca::tile_side>([&](auto column) HFCA_INLINE { store(y * hfca::tile_side + column, c, value[column]); });
    });
  }
}

// Tiles of pixels, which are bytes only where the weights are integers, as packed rows of each position, those of the first from g.words on.
template <class Words, bool quantized>
inline void pack_winograd(const Gemm& g, const hfca::WinogradRows& tiles, int64_t row, int rows) {
  uint32_t* const out = g.words + row * g.input_words;
  const auto pack = [&](const auto& load) HFCA_INLINE {
    for (int i = 0; i < rows; ++i) {
      const void* const* const pixels = tiles.pixels + i * hfca::tile_positions;
      if constexpr (quantized) {
        transform_tile(pixels, g.k, load,
                       [&](int position, int64_t c, Simd::Float x) HFCA_INLINE { Simd::store(tiles.scratch + position * g.k + c, x); });
        for (int position = 0; position < hfca::tile_positions; ++position) {
          const hfca::ByteSteps steps = Words::pack_row(tiles.scratch + position * g.k, g.k, out + position * tiles.words_apart, rows, i);
          const int64_t at = position * tiles.rows_apart + row + i;
          g.input_scale[at] = steps.scale, g.input_zero[at] = packed_zero(steps.zero);
        }
      } else {
        transform_tile(pixels, g.k, load, [&](int position, int64_t c, Simd::Float x) HFCA_INLINE {
          Words::store_channels(out + position * tiles.words_apart, rows, i, c, x);
        });
      }
    }
  };
  if constexpr (quantized)
    if (g.input.bytes) {
      const Simd::Float scale = Simd::set1(g.input.bytes->scale), zero = Simd::set1(g.input.bytes->zero);
      return pack([=](const void* pixel, int64_t c)
                      HFCA_INLINE { return Simd::mul(Simd::sub(Simd::load_uint8(static_cast<const uint8_t*>(pixel) + c), zero), scale); });
    }
  if (g.input.bf16) pack([](const void* pixel, int64_t c) HFCA_INLINE { return Simd::load_bf16(static_cast<const uint16_t*>(pixel) + c); });
  else pack([](const void* pixel, int64_t c) HFCA_INLINE { return Simd::load(static_cast<const float*>(pixel) + c); });
}

// A^T of four vectors.
HFCA_INLINE inline void tile_sums(const Simd::Float (&x)[4], Simd::Float (&to)[2]) {
  const Simd::Float sum = Simd::add(x[1], x[2]), difference = Simd::sub(x[1], x[2]);
  to[0] = Simd::add(x[0], sum), to[1] = Simd::sub(difference, x[3]);
}

template <bool quantized>
inline void winograd_output_of(const Gemm& g, const hfca::WinogradSums& s, int64_t panel) {
  constexpr int most = 8;  // tiles whose pixels are finished together
  alignas(64) float pixels[most * 4 * hfca::panel_columns];
  int32_t indices[most * 4];
  const int64_t column = panel * hfca::panel_columns, left = g.n - column;
  const int columns = left < hfca::panel_columns ? static_cast<int>(left) : hfca::panel_columns;
  Gemm part = g;
  part.outputs[0].index = part.residual.index = indices;
  for (int64_t first = 0; first < s.count; first += most) {
    int count = 0;
    for (int64_t i = first; i < s.count && i < first + most; ++i) {
      const hfca::OutputTile& tile = s.tiles[i];
      const int width = tile.right ? 2 : 1, height = tile.below ? 2 : 1;
      float* const to = pixels + count * hfca::panel_columns;
      for (int v = 0; v < columns; v += Simd::width) {
        const float* const from = s.sums + i * hfca::panel_columns + v;
        const int lanes = columns - v < Simd::width ? columns - v : Simd::width;
        const auto sum_at = [&](int position) HFCA_INLINE {
          const Simd::Float x = Simd::load(from + position * s.sums_apart);
          if constexpr (!quantized) return x;
          const int64_t at = position * s.rows_apart + i, weight = position * g.n + column + v;
          // As in finish_tile.
          const Simd::Float above = Simd::fnma(Simd::set1(g.input_zero[at]), Simd::load_n(g.weight_sum + weight, lanes), x);
          return Simd::mul(Simd::mul(above, Simd::load_n(g.weight_scale + weight, lanes)), Simd::set1(g.input_scale[at]));
        };
        Simd::Float halfway[2][hfca::tile_side];  // [row][column]
        unroll<0, hfca::tile_side>([&](auto x) HFCA_INLINE {
          Simd::Float line[hfca::tile_side], sum[2];
          unroll<0, hfca::tile_side>([&](auto y) HFCA_INLINE { line[y] = sum_at(y * hfca::tile_side + x); });
          tile_sums(line, sum);
          halfway[0][x] = sum[0], halfway[1][x] = sum[1];
        });
        for (int y = 0; y < height; ++y) {
          Simd::Float sum[2];
          tile_sums(halfway[y], sum);
          for (int x = 0; x < width; ++x) Simd::store(to + (y * width + x) * hfca::panel_columns + v, sum[x]);
        }
      }
      for (int y = 0; y < height; ++y)
        for (int x = 0; x < width; ++x) indices[count++] = static_cast<int32_t>(tile.pixel + y * s.out_width + x);
    }
    finish<false>(part, pixels, 0, count, column, columns);
  }
}

inline void winograd_output(const Gemm& g, const hfca::WinogradSums& sums, int64_t panel) {
  g.weight_scale ? winograd_output_of<true>(g, sums, panel) : winograd_output_of<false>(g, sums, panel);
}

}  // namespace HFCA_TIER
