// What a perfect kernel would reach: the inner instruction of each GEMM in a loop without memory traffic, and plain reads.
#pragma once
#include "../gemm/mmla.h"
#include "../gemm/signs.h"
#include "../simd/unroll.h"
#include "../kernels.h"

namespace HFCA_TIER {

// Twelve independent chains, or as many as a tile of the GEMM has, in its shape: two weight vectors by several inputs, so that no
// step is the same as another for the compiler.
template <class Dot>
inline double run_multiply_adds(int64_t iterations, int per_lane) {
  constexpr int vectors = Dot::vectors, tile = Dot::rows * vectors, chains = tile < 12 ? tile : 12;
  alignas(64) uint32_t words[2 * Simd::width + chains + Dot::step_words] = {};
  typename Dot::Acc acc[chains];
  unroll<0, chains>([&](auto c) HFCA_INLINE { acc[c] = Dot::zero(); });
  for (int64_t i = 0; i < iterations; ++i) {
    asm volatile("" : : "r"(words) : "memory");  // the operands may have changed: nothing can be moved out of the loop
    typename Dot::Weight weight[vectors];
    unroll<0, vectors>([&](auto v) HFCA_INLINE { weight[v] = Dot::load(words + v * Simd::width); });
    unroll<0, chains / vectors>([&](auto c) HFCA_INLINE {
      const auto input = Dot::broadcast(words + 2 * Simd::width + c);
      unroll<0, vectors>([&](auto v)
                             HFCA_INLINE { acc[c * vectors + v] = Dot::step(acc[c * vectors + v], input, Dot::widen(weight[v], 0)); });
    });
  }
  alignas(64) float out[chains][Simd::width];
  unroll<0, chains>([&](auto c) HFCA_INLINE { Dot::store(out[c], acc[c]); });
  asm volatile("" : : "r"(out) : "memory");
  return 2.0 * per_lane * Simd::width * chains * static_cast<double>(iterations);
}

#if HFCA_MMLA
// The same of products of two rows by two columns.
template <class Mmla>
inline double run_products_of_pairs(int64_t iterations) {
  constexpr int chains = 24;
  alignas(64) int32_t words[chains + 4] = {};
  int32x4_t acc[chains];
  unroll<0, chains>([&](auto c) HFCA_INLINE { acc[c] = vdupq_n_s32(0); });
  for (int64_t i = 0; i < iterations; ++i) {
    asm volatile("" : : "r"(words) : "memory");
    const int32x4_t rows = vld1q_s32(words), columns = vld1q_s32(words + 4);
    unroll<0, chains>([&](auto c) HFCA_INLINE { Mmla::step(acc[c], rows, columns); });
  }
  alignas(64) float out[chains][4];
  unroll<0, chains>([&](auto c) HFCA_INLINE { vst1q_f32(out[c], Mmla::sums(acc[c])); });
  asm volatile("" : : "r"(out) : "memory");
  return 2.0 * 4 * Mmla::depth * chains * static_cast<double>(iterations);
}
#endif

// Reads n floats (a multiple of 8 vectors), as fast as loads go.
inline float read_stream(const float* p, int64_t n) {
  Simd::Float sum[8];
  unroll<0, 8>([&](auto j) HFCA_INLINE { sum[j] = Simd::zero(); });
  for (int64_t i = 0; i < n; i += 8 * Simd::width)
    unroll<0, 8>([&](auto j) HFCA_INLINE { sum[j] = Simd::add(sum[j], Simd::load(p + i + j * Simd::width)); });
  unroll<1, 8>([&](auto j) HFCA_INLINE { sum[0] = Simd::add(sum[0], sum[j]); });
  return Simd::reduce_add(sum[0]);
}

inline double multiply_adds(hfca::WeightKind kind, int64_t iterations) {
  switch (kind) {
    case hfca::WeightKind::float32:
    case hfca::WeightKind::float32_rows: return run_multiply_adds<DotF32>(iterations, 1);
#if HFCA_MMLA
    case hfca::WeightKind::bfloat16: return run_products_of_pairs<MmlaBf16>(iterations);
    case hfca::WeightKind::int8:
    case hfca::WeightKind::int8_image: return run_products_of_pairs<MmlaInt8>(iterations);
#else
#if HFCA_DOT_BF16
    case hfca::WeightKind::bfloat16: return run_multiply_adds<DotBf16>(iterations, 2);
#else
    case hfca::WeightKind::bfloat16: return run_multiply_adds<DotBf16Widen>(iterations, 1);
#endif
    case hfca::WeightKind::int8:
    case hfca::WeightKind::int8_image:
#endif
    case hfca::WeightKind::int8_weight:
    case hfca::WeightKind::int4:
    case hfca::WeightKind::affine4:
    case hfca::WeightKind::affine8: return run_multiply_adds<Int8Gemm::Dots>(iterations, 4);
  }
  return 0.0;
}

}  // namespace HFCA_TIER
