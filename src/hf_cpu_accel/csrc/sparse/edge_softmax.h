// Softmax over the edges of a row, for all heads at once: x is [edges][heads], and a row has few edges.
#pragma once
#include "../norm/norm_rows.h"
#include "../simd/math.h"

namespace HFCA_TIER {

// Vectors that all have the same heads in the same lanes: across edges where the heads divide the width, else of some heads of each edge.
struct HeadVectors {
  int64_t first, stride, count;  // vector i is at x[first + i * stride]
  int lanes, last_lanes;         // of a vector, and of the last one
  int period;                    // lane l has the head of lane l + period

  int lanes_of(int64_t i) const { return i == count - 1 ? last_lanes : lanes; }
  int64_t at(int64_t i) const { return first + i * stride; }

  // In each lane, what all lanes of its head reduce to.
  template <class Op>
  HFCA_INLINE Float across_edges(Float x, const Op& op) const {
    for (int n = Simd::width / 2; n >= period; n /= 2) x = op(x, Simd::rotate(x, n));
    return x;
  }
};

template <class F>
HFCA_INLINE inline void each_heads(int64_t edges, int64_t heads, const F& f) {
  if (edges == 0 || heads == 0) return;
  if (Simd::width % heads == 0) {
    const int64_t count = (edges * heads + Simd::width - 1) / Simd::width;
    return f(HeadVectors{0, Simd::width, count, Simd::width, static_cast<int>(edges * heads - (count - 1) * Simd::width),
                         static_cast<int>(heads)});
  }
  for (int64_t h = 0; h < heads; h += Simd::width) {
    const int lanes = static_cast<int>(heads - h < Simd::width ? heads - h : Simd::width);
    f(HeadVectors{h, heads, edges, lanes, lanes, Simd::width});
  }
}

// y = exp(x - max(x)) / (sum + 1e-16), which PyTorch Geometric adds; y may be x. NaN makes its head NaN through the sum.
inline void softmax(const float* x, float* y, int64_t edges, int64_t heads) {
  each_heads(edges, heads, [&](const HeadVectors& vectors) HFCA_INLINE {
    const Float lowest = Simd::set1(-__builtin_inff());
    Float largest = lowest, sum = Simd::zero();
    for (int64_t i = 0; i < vectors.count; ++i) {
      const int lanes = vectors.lanes_of(i);
      largest = Simd::max(largest, Simd::select_n(load_columns<false>(x, vectors.at(i), lanes), lanes, lowest));
    }
    largest = vectors.across_edges(largest, [](Float a, Float b) HFCA_INLINE { return Simd::max(a, b); });
    for (int64_t i = 0; i < vectors.count; ++i) {
      const int lanes = vectors.lanes_of(i);
      const Float power = exp(Simd::sub(load_columns<false>(x, vectors.at(i), lanes), largest));
      store_columns<false>(y, vectors.at(i), lanes, power);
      sum = Simd::add(sum, Simd::select_n(power, lanes, Simd::zero()));
    }
    sum = vectors.across_edges(sum, [](Float a, Float b) HFCA_INLINE { return Simd::add(a, b); });
    const Float inverse = Simd::div(Simd::set1(1.0f), Simd::add(sum, Simd::set1(1e-16f)));
    for (int64_t i = 0; i < vectors.count; ++i) {
      const int lanes = vectors.lanes_of(i);
      store_columns<false>(y, vectors.at(i), lanes, Simd::mul(load_columns<false>(y, vectors.at(i), lanes), inverse));
    }
  });
}

// grad_x = y * (grad - <y, grad>) where y is the softmax and grad that of its loss.
inline void softmax_backward(const float* y, const float* grad, float* grad_x, int64_t edges, int64_t heads) {
  each_heads(edges, heads, [&](const HeadVectors& vectors) HFCA_INLINE {
    Float inner = Simd::zero();
    for (int64_t i = 0; i < vectors.count; ++i) {
      const int lanes = vectors.lanes_of(i);
      inner = Simd::fma(load_columns<false>(y, vectors.at(i), lanes), load_columns<false>(grad, vectors.at(i), lanes), inner);
    }
    inner = vectors.across_edges(inner, [](Float a, Float b) HFCA_INLINE { return Simd::add(a, b); });
    for (int64_t i = 0; i < vectors.count; ++i) {
      const int lanes = vectors.lanes_of(i);
      const Float difference = Simd::sub(load_columns<false>(grad, vectors.at(i), lanes), inner);
      store_columns<false>(grad_x, vectors.at(i), lanes, Simd::mul(load_columns<false>(y, vectors.at(i), lanes), difference));
    }
  });
}

}  // namespace HFCA_TIER
