// Queries, keys and values as float32 in the layouts that the tile multiplication streams.
#pragma once
#include <type_traits>

#include "attention.h"
#include "tile.h"

namespace HFCA_TIER {

constexpr int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

inline int lanes(int64_t left) { return left < Simd::width ? static_cast<int>(left) : Simd::width; }

// n features of one position, zeros behind them; those of int8 are still to be multiplied by their scale. `at` counts elements.
template <hfca::HeadType type>
inline Float load_features(const void* data, int64_t at, int n) {
  if constexpr (type == hfca::HeadType::float32) {
    const float* p = static_cast<const float*>(data) + at;
    return n == Simd::width ? Simd::load(p) : Simd::load_n(p, n);
  } else if constexpr (type == hfca::HeadType::bfloat16) {
    const uint16_t* p = static_cast<const uint16_t*>(data) + at;
    return n == Simd::width ? Simd::load_bf16(p) : Simd::load_bf16_n(p, n);
  } else {
    const int8_t* p = static_cast<const int8_t*>(data) + at;
    return n == Simd::width ? Simd::load_int8(p) : Simd::load_int8_n(p, n);
  }
}

// f(type) with the type of x as a constant.
template <class F>
inline void with_head_type(const hfca::Heads& x, const F& f) {
  using hfca::HeadType;
  switch (x.type) {
    case HeadType::float32: return f(std::integral_constant<HeadType, HeadType::float32>{});
    case HeadType::bfloat16: return f(std::integral_constant<HeadType, HeadType::bfloat16>{});
    case HeadType::int8: return f(std::integral_constant<HeadType, HeadType::int8>{});
  }
}

inline void store_features(const hfca::Heads& x, int64_t at, int n, Float value) {
  if (x.type == hfca::HeadType::bfloat16) {
    uint16_t* p = static_cast<uint16_t*>(x.data) + at;
    n == Simd::width ? Simd::store_bf16(p, value) : Simd::store_bf16_n(p, value, n);
  } else {
    float* p = static_cast<float*>(x.data) + at;
    n == Simd::width ? Simd::store(p, value) : Simd::store_n(p, value, n);
  }
}

// Which query head and position a row of a task is (see attention.h). Steps are cheap, divisions are not.
struct RowPosition {
  int64_t q_len, head, position;

  RowPosition(const hfca::Attention& a, const hfca::AttentionTask& task, int64_t row)
      : q_len(a.q_len), head(task.kv_head * a.group + row / a.q_len), position(row % a.q_len) {}

  void step() {
    if (++position == q_len) position = 0, ++head;
  }
  int64_t offset(int64_t head_stride, int64_t position_stride) const { return head * head_stride + position * position_stride; }
};

// The elements at which the query rows [row, row + rows) of a task begin.
inline void locate_queries(const hfca::Attention& a, const hfca::AttentionTask& task, int64_t row, int rows, int64_t* at) {
  RowPosition position(a, task, row);
  for (int i = 0; i < rows; ++i, position.step())
    at[i] = task.batch * a.query.batch_stride + position.offset(a.query.head_stride, a.query.position_stride);
}

// out[features / 32][rows][32] = factor * rows of x, which begin at elements at[i].
inline void pack_queries(const hfca::Heads& x, const int64_t* at, int rows, int64_t features, float factor, float* out) {
  const Float scale = Simd::set1(factor);
  for (int i = 0; i < rows; ++i)
    for (int64_t d = 0; d < features; d += Simd::width) {
      const int n = lanes(features - d);
      const Float row = x.type == hfca::HeadType::bfloat16 ? load_features<hfca::HeadType::bfloat16>(x.data, at[i] + d, n)
                                                           : load_features<hfca::HeadType::float32>(x.data, at[i] + d, n);
      Simd::store(out + (d / chunk * rows + i) * chunk + d % chunk, Simd::mul(scale, row));
    }
}

// out[count / 32][features][32] = keys of x, which begin at elements at(k), transposed; the last chunk is filled up with zeros.
template <hfca::HeadType type, class At>
inline void pack_keys(const hfca::Heads& x, const At& at, int64_t features, int64_t count, float* out) {
  for (int64_t k = 0; k < round_up(count, chunk); k += Simd::width) {
    float* columns = out + k / chunk * chunk * features + k % chunk;
    [[maybe_unused]] alignas(64) float scale[Simd::width] = {};
    if constexpr (type == hfca::HeadType::int8)
      for (int i = 0; i < Simd::width && k + i < count; ++i) scale[i] = x.scale(at(k + i), features);
    for (int64_t d = 0; d < features; d += Simd::width) {
      const int n = lanes(features - d);
      Float block[Simd::width];
      for (int i = 0; i < Simd::width; ++i) block[i] = k + i < count ? load_features<type>(x.data, at(k + i) + d, n) : Simd::zero();
      Simd::transpose(block);
      if constexpr (type == hfca::HeadType::int8)
        for (int i = 0; i < n; ++i) block[i] = Simd::mul(block[i], Simd::load(scale));
      for (int i = 0; i < n; ++i) Simd::store(columns + (d + i) * chunk, block[i]);
    }
  }
}

// out[value_dim / 32][key_rows][32] = values [begin, end); columns behind value_dim are zero up to the vector width.
template <hfca::HeadType type>
inline void pack_values(const hfca::Attention& a, const hfca::AttentionTask& task, int64_t begin, int64_t end, int64_t key_rows,
                        float* out) {
  for (int64_t k = begin; k < end; ++k, out += chunk) {
    const int64_t row = a.batch_of_key(k, task.batch),
                  at = row * a.value.batch_stride + task.kv_head * a.value.head_stride + k * a.value.position_stride;
    [[maybe_unused]] const Float scale = Simd::set1(a.value.scale(at, a.value_dim));
    for (int64_t d = 0; d < a.value_dim; d += Simd::width) {
      const Float x = load_features<type>(a.value.data, at + d, lanes(a.value_dim - d));
      Simd::store(out + d / chunk * key_rows * chunk + d % chunk, type == hfca::HeadType::int8 ? Simd::mul(scale, x) : x);
    }
  }
}

}  // namespace HFCA_TIER
