// The vector wrapper of the tier being compiled. A kernel file is compiled once per tier; the build defines HFCA_TIER (the
// tier's namespace) and exactly one of HFCA_SIMD_{GENERIC,AVX2,AVX512}. Every wrapper has the same static interface:
//   Float, Int, width, registers; zero set1 load load_n store store_n; add sub mul div max min fma fnma abs copysign round
//   scale_by_power_of_two reduce_add reduce_max; load_bf16[_n] store_bf16[_n]; to_float load_int store_bytes_n
// `_n` forms touch the first n lanes only (0 <= n <= width), the others read as zero.
#pragma once
#if defined(HFCA_SIMD_AVX512)
#include "avx512.h"
#elif defined(HFCA_SIMD_AVX2)
#include "avx2.h"
#else
#include "generic.h"
#endif
