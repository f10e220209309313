// The vector wrapper of the tier being compiled. A kernel file is compiled once per tier; the build defines HFCA_TIER (the
// tier's namespace) and exactly one of HFCA_SIMD_{GENERIC,AVX2,AVX512}. Every wrapper has the same static interface:
//   Float, Int, width, registers; zero set1 load load_n store store_n; add sub mul div max min fma fnma abs copysign round
//   scale_by_power_of_two select_n transpose reduce_add reduce_max max_magnitude reduce_max_magnitude; load_bf16[_n] store_bf16[_n]; to_float load_int store_bytes[_n]
// `_n` forms touch the first n lanes only (0 <= n <= width), the others read as zero. select_n(x, n, rest) takes the first n lanes
// of x and the others of rest; transpose(r) transposes the width x width block of the vectors r[0..width) in place.
// avx512 has swap_halves too.
#pragma once
#if defined(HFCA_SIMD_AVX512)
#include "avx512.h"
#elif defined(HFCA_SIMD_AVX2)
#include "avx2.h"
#else
#include "generic.h"
#endif
