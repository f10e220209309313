// float32 weights as torch has them, [n][k]: shared with an embedding, so that no packed copy is kept. Each panel is packed when it is
// multiplied by a block of rows.
//
// Cost beside the product: 32 k words of a panel are read once, transposed and written to L2. Some 0.4 cycles each, where 14 rows are
// multiplied by them in 7: a tenth of the time of 64 rows.
#pragma once
#include "microkernel.h"

namespace HFCA_TIER {

struct FloatRowsGemm : TierGemm<DotF32> {
  static void unpack(const Gemm& g, const void* panel, int64_t begin, int64_t end, void* unpacked) {
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
    hfca::GemmKernels k = TierGemm<DotF32>::kernels();
    k.unpack = &unpack;
    k.pack_winograd = nullptr;
    return k;
  }
};

}  // namespace HFCA_TIER
