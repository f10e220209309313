// float32 weights as torch has them, [n][k]: shared with an embedding, so that no packed copy is kept.
//
// A few rows are multiplied by them as they lie, in the time of reading them: 4 n k bytes. A row's sums are those of its lanes, along k,
// whatever the number of rows; they are others than those of many rows. For these, each panel is packed when it is
// multiplied by a block of rows. Beside the product its 32 k words are then read once, transposed and written to L2: some 0.4 cycles
// each, where 14 rows are multiplied by them in 7: a tenth of the time of 64 rows, while panels stay in L2.
#pragma once
#include "microkernel.h"

namespace HFCA_TIER {

struct FloatRowsGemm : TierGemm<DotF32> {
  static constexpr int few_rows = 8, most_rows = 16;  // at once, and in all

  // Output features are taken several at a time: so many streams of weights, and sums enough to hide the latency of the multipliers.
  template <int rows>
  static void multiply_few(const Gemm& g, int64_t row, int64_t panel, const float* weight) {
    constexpr int room = (Simd::registers == 32 ? 16 : 8) / rows, together = room >= 4 ? 4 : room >= 2 ? 2 : 1;
    alignas(64) float sums[rows * hfca::panel_columns];
    const auto* const input = reinterpret_cast<const float*>(g.words + row * g.input_words);
    const int64_t column = panel * hfca::panel_columns, left = g.n - column;
    const int columns = left < hfca::panel_columns ? static_cast<int>(left) : hfca::panel_columns;
    for (int c = 0; c < columns; c += together) {
      Simd::Float sum[rows][together];
      const float* from[together];  // behind the last feature: that one again
      unroll<0, together>([&](auto j) HFCA_INLINE {
        from[j] = weight + (c + j < columns ? c + j : columns - 1) * g.k;
        unroll<0, rows>([&](auto i) HFCA_INLINE { sum[i][j] = Simd::zero(); });
      });
      const auto step = [&](int64_t k, const auto& load) HFCA_INLINE {
        Simd::Float w[together];
        unroll<0, together>([&](auto j) HFCA_INLINE {
          __builtin_prefetch(reinterpret_cast<const char*>(from[j] + k) + hfca::far_bytes, 0, 2);
          w[j] = load(from[j] + k);
        });
        const float* const x = input + k / packed_words * rows * packed_words + k % packed_words;
        unroll<0, rows>([&](auto i) HFCA_INLINE {
          const Simd::Float value = Simd::load(x + i * packed_words);
          unroll<0, together>([&](auto j) HFCA_INLINE { sum[i][j] = Simd::fma(value, w[j], sum[i][j]); });
        });
      };
      int64_t k = 0;
      for (; k + Simd::width <= g.k; k += Simd::width) step(k, [](const float* p) HFCA_INLINE { return Simd::load(p); });
      const int rest = static_cast<int>(g.k - k);
      if (rest > 0) step(k, [rest](const float* p) HFCA_INLINE { return Simd::load_n(p, rest); });
      unroll<0, rows>([&](auto i) HFCA_INLINE {
        unroll<0, together>([&](auto j) HFCA_INLINE { sums[i * hfca::panel_columns + c + j] = Simd::reduce_add(sum[i][j]); });
      });
    }
    finish<false>(g, sums, row, rows, column, columns);
  }

  static void compute_few(const Gemm& g, int64_t row, int rows, int64_t panel, const void* weight, hfca::Ahead, hfca::Part) {
    const auto* const from = static_cast<const float*>(weight);
    switch (rows) {
      case 1: return multiply_few<1>(g, row, panel, from);
      case 2: return multiply_few<2>(g, row, panel, from);
      case 3: return multiply_few<3>(g, row, panel, from);
      case 4: return multiply_few<4>(g, row, panel, from);
      case 5: return multiply_few<5>(g, row, panel, from);
      case 6: return multiply_few<6>(g, row, panel, from);
      case 7: return multiply_few<7>(g, row, panel, from);
      case 8: return multiply_few<8>(g, row, panel, from);
    }
  }

  static void unpack(const Gemm& g, const void* panel, int64_t begin, int64_t end, void* unpacked) {
    if (g.k == 0) return;
    const auto* const weight = static_cast<const float*>(panel);
    auto* const out = static_cast<float*>(unpacked);
    const int64_t row = (weight - static_cast<const float*>(g.weight)) / g.k, left = g.n - row;
    const int rows = left < hfca::panel_columns ? static_cast<int>(left) : hfca::panel_columns;
    end = end < g.k ? end : g.k;
    for (int64_t k = begin; k < end; k += Simd::width) {
      const int words = end - k < Simd::width ? static_cast<int>(end - k) : Simd::width;
      for (int r = 0; r < hfca::panel_columns; r += Simd::width) {
        Simd::Float block[Simd::width];
        unroll<0, Simd::width>([&](auto i) HFCA_INLINE {
          const float* const from = weight + (r + i) * g.k + k;
          block[i] = r + i >= rows ? Simd::zero() : words == Simd::width ? Simd::load(from) : Simd::load_n(from, words);
        });
        Simd::transpose(block);
        float* const to = out + (k - begin) * hfca::panel_columns + r;
        for (int i = 0; i < words; ++i) Simd::store(to + i * hfca::panel_columns, block[i]);
      }
    }
  }

  static constexpr hfca::GemmKernels kernels() {
    hfca::GemmKernels k{few_rows, 0, &input_words, &panel_bytes, &DotF32::Words::pack, &compute_few};
    k.most_rows = most_rows;
    return k;
  }
  static constexpr hfca::GemmKernels unpacked_kernels() {
    hfca::GemmKernels k = TierGemm<DotF32>::kernels();
    k.unpack = &unpack;
    k.pack_winograd = nullptr;
    return k;
  }
};

}  // namespace HFCA_TIER
