// What a perfect kernel would reach: the inner instruction of each GEMM in a loop without memory traffic, and plain reads.
#pragma once
#include "../gemm/dot.h"
#include "../kernels.h"

namespace HFCA_TIER {

template <class Dot>
inline double run_multiply_adds(int64_t iterations, int per_lane) {
  constexpr int chains = 12;
  alignas(64) uint32_t words[Simd::width] = {};
  typename Dot::Acc acc[chains];
#pragma GCC unroll 12
  for (int c = 0; c < chains; ++c) acc[c] = Dot::zero();
  const auto weight = Dot::widen(Dot::load(words), 0);
  const auto input = Dot::broadcast(words);
  for (int64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 12
    for (int c = 0; c < chains; ++c) {
      acc[c] = Dot::step(acc[c], input, weight);
#if defined(HFCA_SIMD_AVX512) || defined(HFCA_SIMD_AVX2)
      asm volatile("" : "+v"(acc[c]));  // keep every step
#endif
    }
  }
  alignas(64) float out[chains][Simd::width];
#pragma GCC unroll 12
  for (int c = 0; c < chains; ++c) Dot::store(out[c], acc[c]);
  volatile float sink = out[0][0];
  (void)sink;
  return 2.0 * per_lane * Simd::width * chains * static_cast<double>(iterations);
}

// Reads n floats (a multiple of 8 vectors), as fast as loads go.
inline float read_stream(const float* p, int64_t n) {
  Simd::Float sum[8];
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j) sum[j] = Simd::zero();
  for (int64_t i = 0; i < n; i += 8 * Simd::width)
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) sum[j] = Simd::add(sum[j], Simd::load(p + i + j * Simd::width));
#pragma GCC unroll 8
  for (int j = 1; j < 8; ++j) sum[0] = Simd::add(sum[0], sum[j]);
  return Simd::reduce_add(sum[0]);
}

inline double multiply_adds(hfca::WeightKind kind, int64_t iterations) {
  switch (kind) {
    case hfca::WeightKind::float32: return run_multiply_adds<DotF32>(iterations, 1);
#if defined(__AVX512BF16__) && defined(HFCA_SIMD_AVX512)
    case hfca::WeightKind::bfloat16: return run_multiply_adds<DotBf16>(iterations, 2);
#else
    case hfca::WeightKind::bfloat16: return run_multiply_adds<DotBf16Widen>(iterations, 1);
#endif
    case hfca::WeightKind::int8: return run_multiply_adds<DotInt8>(iterations, 4);
  }
  return 0.0;
}

}  // namespace HFCA_TIER
