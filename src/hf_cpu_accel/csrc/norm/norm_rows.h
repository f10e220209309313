// Norms row by row: memory is read once and written once, the passes in between run over the row in L1. The variance is taken
// around the mean in a pass of its own: mean(x^2) - mean(x)^2 cancels when the mean is large.
#pragma once
#include "../simd/math.h"
#include "norm.h"

namespace HFCA_TIER {

// Types are template arguments: a branch per vector would cost as much as the arithmetic.
template <bool bf16>
inline Float load_columns(const void* row, int64_t column, int n) {
  if constexpr (bf16) {
    const uint16_t* p = static_cast<const uint16_t*>(row) + column;
    return n == Simd::width ? Simd::load_bf16(p) : Simd::load_bf16_n(p, n);
  } else {
    const float* p = static_cast<const float*>(row) + column;
    return n == Simd::width ? Simd::load(p) : Simd::load_n(p, n);
  }
}

template <bool bf16>
inline void store_columns(void* row, int64_t column, int n, Float x) {
  if constexpr (bf16) {
    uint16_t* p = static_cast<uint16_t*>(row) + column;
    n == Simd::width ? Simd::store_bf16(p, x) : Simd::store_bf16_n(p, x, n);
  } else {
    float* p = static_cast<float*>(row) + column;
    n == Simd::width ? Simd::store(p, x) : Simd::store_n(p, x, n);
  }
}

// f(first, lanes) over the vectors of a row.
template <class F>
inline void each_vector(int64_t columns, const F& f) {
  int64_t j = 0;
  for (; j + Simd::width <= columns; j += Simd::width) f(j, Simd::width);
  if (j < columns) f(j, static_cast<int>(columns - j));
}

inline void* row_of(const hfca::Matrix& x, int64_t row) {
  return static_cast<char*>(x.data) + x.offset(row) * static_cast<int64_t>(x.bf16 ? sizeof(uint16_t) : sizeof(float));
}

// The sum over the first n lanes of each term(column, n). Four chains, because one would wait for the latency of the addition.
template <class Term>
inline float sum_columns(int64_t columns, Term term) {
  constexpr int chains = 4;
  Float total[chains];
#pragma GCC unroll 4
  for (int c = 0; c < chains; ++c) total[c] = Simd::zero();
  int64_t j = 0;
  for (; j + chains * Simd::width <= columns; j += chains * Simd::width) {
#pragma GCC unroll 4
    for (int c = 0; c < chains; ++c) total[c] = Simd::add(total[c], term(j + c * Simd::width, Simd::width));
  }
  for (; j + Simd::width <= columns; j += Simd::width) total[0] = Simd::add(total[0], term(j, Simd::width));
  if (j < columns) {
    const int rest = static_cast<int>(columns - j);
    total[1] = Simd::add(total[1], Simd::select_n(term(j, rest), rest, Simd::zero()));
  }
  return Simd::reduce_add(Simd::add(Simd::add(total[0], total[1]), Simd::add(total[2], total[3])));
}

// Puts x = input + residual into `x` as float32 and into norm.sum, returns the sum over the row.
template <bool bf16, bool residual, bool residual_bf16>
inline float read_row(const hfca::Norm& norm, int64_t row, float* x) {
  const void* input = row_of(norm.input, row);
  const void* other = residual ? row_of(norm.residual, row) : nullptr;
  void* sum = residual ? row_of(norm.sum, row) : nullptr;
  return sum_columns(norm.columns, [=](int64_t j, int n) {
    Float value = load_columns<bf16>(input, j, n);
    if constexpr (residual) {
      value = Simd::add(value, load_columns<residual_bf16>(other, j, n));
      store_columns<bf16>(sum, j, n, value);
    }
    store_columns<false>(x, j, n, value);
    return value;
  });
}

// The mean comes in two parts: as one float32 it is off by up to half its last place, which shows where the values of a row are
// nearly equal. What the high part leaves of the row has a mean of its own, the low part.
template <bool rms, bool bf16>
inline void finish_row(const hfca::Norm& norm, const float* x, float total, const float* weight, const float* bias, void* output) {
  const int64_t columns = norm.columns;
  const float count = static_cast<float>(columns);
  const Float high = Simd::set1(rms ? 0.0f : total / count);
  const auto above_high = [=](int64_t j, int n) {
    const Float value = load_columns<false>(x, j, n);
    return rms ? value : Simd::sub(value, high);
  };
  const Float low = Simd::set1(rms ? 0.0f : sum_columns(columns, above_high) / count);
  const auto centered = [=](int64_t j, int n) {
    const Float value = above_high(j, n);
    return rms ? value : Simd::sub(value, low);
  };
  const float squares = sum_columns(columns, [=](int64_t j, int n) {
    const Float value = centered(j, n);
    return Simd::mul(value, value);
  });
  const Float inverse = Simd::set1(1.0f / __builtin_sqrtf(squares / count + norm.eps));
  const auto normalize = [=](int64_t j, int n) {
    Float value = Simd::mul(centered(j, n), inverse);
    value = rms ? Simd::mul(value, load_columns<false>(weight, j, n))
                : Simd::fma(value, load_columns<false>(weight, j, n), load_columns<false>(bias, j, n));
    store_columns<bf16>(output, j, n, value);
  };
  int64_t j = 0;
  for (; j + Simd::width <= columns; j += Simd::width) normalize(j, Simd::width);
  if (j < columns) normalize(j, static_cast<int>(columns - j));
}

// The vector as float32: itself, or converted into `buffer`; `missing` everywhere if there is none.
inline const float* as_float32(const hfca::Array& vector, int64_t length, float missing, float* buffer) {
  if (vector.data && !vector.bf16) return static_cast<const float*>(vector.data);
  for (int64_t j = 0; j < length; j += Simd::width) {
    const int n = length - j < Simd::width ? static_cast<int>(length - j) : Simd::width;
    store_columns<false>(buffer, j, n, vector.data ? load_columns<true>(vector.data, j, n) : Simd::set1(missing));
  }
  return buffer;
}

template <bool rms, bool bf16>
inline void typed_norm_rows(const hfca::Norm& norm, int64_t begin, int64_t end, float* buffer) {
  const int64_t columns = norm.columns;
  const float* weight = as_float32(norm.weight, columns, 1.0f, buffer + columns);
  const float* bias = rms ? nullptr : as_float32(norm.bias, columns, 0.0f, buffer + 2 * columns);
  const auto read = !norm.residual.data  ? &read_row<bf16, false, false>
                    : norm.residual.bf16 ? &read_row<bf16, true, true>
                                         : &read_row<bf16, true, false>;
  const auto finish = norm.output.bf16 ? &finish_row<rms, true> : &finish_row<rms, false>;
  for (int64_t row = begin; row < end; ++row) {
    const float* x = buffer;
    float total = 0.0f;
    if (bf16 || norm.residual.data) {
      total = read(norm, row, buffer);
    } else {  // float32 without a residual is used where it lies
      x = static_cast<const float*>(row_of(norm.input, row));
      if (!rms) total = sum_columns(columns, [=](int64_t j, int n) { return load_columns<false>(x, j, n); });
    }
    finish(norm, x, total, weight, bias, row_of(norm.output, row));
  }
}

template <bool rms>
inline void norm_rows(const hfca::Norm& norm, int64_t begin, int64_t end, float* buffer) {
  return norm.input.bf16 ? typed_norm_rows<rms, true>(norm, begin, end, buffer) : typed_norm_rows<rms, false>(norm, begin, end, buffer);
}

constexpr hfca::NormKernels norm_kernels() { return {&norm_rows<false>, &norm_rows<true>}; }

}  // namespace HFCA_TIER
