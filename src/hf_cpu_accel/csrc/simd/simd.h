// The vector wrapper of the tier being compiled. A kernel file is compiled once per tier; the build defines HFCA_TIER (the
// tier's namespace) and exactly one of HFCA_SIMD_{GENERIC,AVX2,AVX512,NEON}. Every wrapper has the same static interface:
//   Float, Int, width, registers; zero set1 load load_n store store_n; add sub mul div max min fma fnma rotate_pairs where_equal abs copysign round fraction
//   scale_by_power_of_two select_n rotate pick transpose reduce_add reduce_max; highest reduce_highest lowest reduce_lowest;
//   load_bf16[_n] store_bf16[_n] load_int8[_n] load_uint8[_n] store_uint8[_n]; to_float load_int store_bytes store_pairs (avx2, avx512)
// `_n` forms touch the first n lanes only (0 <= n <= width), the others read as zero. select_n(x, n, rest) takes the first n lanes
// of x and the others of rest; lane i of rotate(x, n) is lane (i + n) % width of x, that of pick(x, lanes) lane lanes[i]; transpose(r) transposes the width x width block of the vectors r[0..width) in place.
// highest(a, x), a >= 0, is the larger one, and lowest(a, x) the smaller one, or any number from 0 up while none was below it; both
// compare bits, so that NaN of either sign wins over infinity in one of the two. store_bytes(p, x) rounds the four vectors x to
// integers and stores those in [0, 255] as bytes; store_pairs(p, low, high) rounds to int16 and stores the two halves of words.
// to_int(x), of avx2 and avx512, rounds. store_shorts(p, x), where VNNI may be missing, rounds to int16 and changes the places of the second and the third of each four.
// Where products are bfloat16's, words of two: load_bf16_words(p, n) of n numbers that lie side by side, bf16_words(x, y) of those in two
// vectors, bf16_couples(x, y) of x[i] (low) and y[i], which avx512 does not round; store_words, and words_as_floats of the same bits.
// store_uint8(p, x) rounds x, whose lanes are in [0, 255]. avx512 has store_byte_rows(p, q, x, least): the first two vectors to p, the others
// to q, as store_bytes, and what is below `least` as that.
// rotate_pairs(x, cos, sin) is x cos - y sin in even lanes and x cos + y sin in odd ones, y the other lane of the pair.
// where_equal(a, b, x, y) takes the lanes of x where a == b and those of y elsewhere, also where one is NaN.
// fraction(x) of finite x is x - floor(x). avx512 has swap_halves too.
#pragma once
#if defined(HFCA_SIMD_AVX512)
#include "avx512.h"
#elif defined(HFCA_SIMD_AVX2)
#include "avx2.h"
#elif defined(HFCA_SIMD_NEON)
#include "neon.h"
#else
#include "generic.h"
#endif
