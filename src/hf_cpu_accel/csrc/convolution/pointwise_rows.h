// The kernels of pointwise.h.
//
// A depthwise convolution multiplies each number that it loads by one row of the window's weights and adds to as many sums: some outputs
// that lie side by side are computed together, in registers, so that each pixel is loaded once per row of the window. Windows of the usual
// sizes are compiled as such. Pixels beside the image are not read: where a tile of outputs has such, it asks column by column.
#pragma once
#include "../gemm/activate.h"
#include "../simd/unroll.h"
#include "gather_rows.h"
#include "pointwise.h"

namespace HFCA_TIER {

template <class F>
HFCA_INLINE inline void with_activation(hfca::Activation activation, const F& f) {
  using hfca::Activation;
  switch (activation) {
    // clang-format off
#define HFCA_ACTIVATION(A) case Activation::A: return f([](Simd::Float x) HFCA_INLINE { return activate<Activation::A, false>(x); });
    HFCA_ACTIVATION(none) HFCA_ACTIVATION(gelu) HFCA_ACTIVATION(gelu_tanh) HFCA_ACTIVATION(relu) HFCA_ACTIVATION(silu)
    HFCA_ACTIVATION(quick_gelu) HFCA_ACTIVATION(tanh) HFCA_ACTIVATION(relu2) HFCA_ACTIVATION(relu6) HFCA_ACTIVATION(hardswish)
    HFCA_ACTIVATION(sigmoid) HFCA_ACTIVATION(hardsigmoid)
#undef HFCA_ACTIVATION
    // clang-format on
  }
}

// Those that take many instructions: compiled once for all windows.
__attribute__((noinline)) inline void activate_vectors(hfca::Activation activation, float* x, int vectors) {
  with_activation(activation, [&](auto act) HFCA_INLINE {
    for (int i = 0; i < vectors; ++i) Simd::store(x + i * Simd::width, act(Simd::load(x + i * Simd::width)));
  });
}

template <int vectors>
HFCA_INLINE inline void activate_sums(hfca::Activation activation, Simd::Float (&sums)[vectors]) {
  using hfca::Activation;
  switch (activation) {
#define HFCA_ACTIVATION(A) \
  case Activation::A: return unroll<0, vectors>([&](auto i) HFCA_INLINE { sums[i] = activate<Activation::A, false>(sums[i]); });
    case Activation::none:
      return;
      HFCA_ACTIVATION(relu)
      HFCA_ACTIVATION(relu6)
      HFCA_ACTIVATION(hardswish)
#undef HFCA_ACTIVATION
    default: break;
  }
  alignas(64) float x[vectors * Simd::width];
  unroll<0, vectors>([&](auto i) HFCA_INLINE { Simd::store(x + i * Simd::width, sums[i]); });
  activate_vectors(activation, x, vectors);
  unroll<0, vectors>([&](auto i) HFCA_INLINE { sums[i] = Simd::load(x + i * Simd::width); });
}

using hfca::DepthwiseRow;

// Outputs [first, first + count) of some channels from c on.
struct DepthwisePlace {
  int64_t first;
  int count;
  int64_t c;
};

template <int tile>
HFCA_INLINE inline void store_outputs(const DepthwiseRow& d, const DepthwisePlace& at, int n, Simd::Float (&sums)[tile]) {
  activate_sums(d.activation, sums);
  const int64_t start = at.first * d.channels + at.c;
  unroll<0, tile>([&](auto t) HFCA_INLINE {
    if (t >= at.count) return;
    const int64_t to = start + t * d.channels;
    const hfca::Matrix output{d.output, d.channels, d.output_bf16};
    n == Simd::width ? store_lanes<true>(output, to, sums[t], n) : store_lanes<false>(output, to, sums[t], n);
  });
}

// A window of that size and stride without dilation, all lanes. edge: some columns lie beside the image, or some outputs behind the row.
template <class T, int size, int stride, int tile, bool edge>
HFCA_INLINE inline void depthwise_tile(const DepthwiseRow& d, const DepthwisePlace& at) {
  constexpr int columns = (tile - 1) * stride + size;
  const int64_t left = at.first * stride - d.padding;
  Simd::Float sums[tile];
  const Simd::Float bias = Simd::load(d.bias + at.c);
  unroll<0, tile>([&](auto t) HFCA_INLINE { sums[t] = bias; });
  const T* x = static_cast<const T*>(d.input) + left * d.pixel_apart + at.c;
  const float* w = d.weight + at.c;
  for (int64_t i = 0; i < d.rows; ++i, x += d.row_apart, w += size * d.channels) {
    Simd::Float weights[size];
    unroll<0, size>([&](auto j) HFCA_INLINE { weights[j] = Simd::load(w + j * d.channels); });
    unroll<0, columns>([&](auto column) HFCA_INLINE {
      if (edge && static_cast<uint64_t>(left + column) >= static_cast<uint64_t>(d.width)) return;
      const Simd::Float value = load_as_float(x + column * d.pixel_apart);
      unroll<0, tile>([&](auto t) HFCA_INLINE {
        constexpr int j = decltype(column)::number - decltype(t)::number * stride;
        if constexpr (j >= 0 && j < size) sums[t] = Simd::fma(value, weights[j], sums[t]);
      });
    });
  }
  store_outputs(d, at, Simd::width, sums);
}

// Any window and any number of lanes.
template <class T, int tile>
inline void depthwise_tile_of_any(const DepthwiseRow& d, const DepthwisePlace& at, int n) {
  Simd::Float sums[tile];
  const Simd::Float bias = Simd::load_n(d.bias + at.c, n);
  unroll<0, tile>([&](auto t) HFCA_INLINE { sums[t] = bias; });
  const T* const x = static_cast<const T*>(d.input) + at.c;
  for (int64_t i = 0; i < d.rows; ++i)
    for (int64_t j = 0; j < d.size; ++j) {
      const Simd::Float weight = Simd::load_n(d.weight + (i * d.size + j) * d.channels + at.c, n);
      const int64_t left = at.first * d.stride - d.padding + j * d.dilation;
      unroll<0, tile>([&](auto t) HFCA_INLINE {
        const int64_t column = left + t * d.stride;
        if (t >= at.count || column < 0 || column >= d.width) return;
        sums[t] = Simd::fma(load_as_float_n(x + i * d.row_apart + column * d.pixel_apart, n), weight, sums[t]);
      });
    }
  store_outputs(d, at, n, sums);
}

// compute(place, edge) for tiles of outputs, and for all channels of each.
template <int tile, class F>
HFCA_INLINE inline void each_tile(const DepthwiseRow& d, const F& compute) {
  const int64_t reach = (tile - 1) * d.stride + (d.size - 1) * d.dilation + 1;
  for (int64_t first = 0; first < d.out_width; first += tile) {
    const int64_t left = first * d.stride - d.padding, rest = d.out_width - first;
    const bool edge = left < 0 || left + reach > d.width || rest < tile;
    compute(DepthwisePlace{first, static_cast<int>(rest < tile ? rest : tile), 0}, edge);
  }
}

template <class T, int size, int stride, int tile>
inline void depthwise_tiles(const DepthwiseRow& d) {
  each_tile<tile>(d, [&](DepthwisePlace at, bool edge) HFCA_INLINE {
    const auto over_channels = [&](auto edged) HFCA_INLINE {
      for (at.c = d.begin; at.c < d.end; at.c += Simd::width) {
        if (at.c + Simd::width > d.end) at.c = d.end - Simd::width;  // what lies before it is computed once more
        depthwise_tile<T, size, stride, tile, edged != 0>(d, at);
      }
    };
    edge ? over_channels(Index<1>{}) : over_channels(Index<0>{});
  });
}

template <class T>
inline void depthwise_of_any(const DepthwiseRow& d) {
  each_tile<8>(d, [&](DepthwisePlace at, bool) {
    for (at.c = d.begin; at.c < d.end; at.c += Simd::width) depthwise_tile_of_any<T, 8>(d, at, lanes_left(at.c, d.end));
  });
}

template <class T>
inline void depthwise_of(const DepthwiseRow& d) {
  if (d.dilation != 1 || d.end - d.begin < Simd::width) return depthwise_of_any<T>(d);
  // Images of 224 x 224 become some of 7, 14, 28, ... columns.
  const bool sevens = (d.out_width + 6) / 7 * 7 < (d.out_width + 7) / 8 * 8;
#define HFCA_WINDOW(size_, stride_)           \
  if (d.size == size_ && d.stride == stride_) \
    return sevens ? depthwise_tiles<T, size_, stride_, 7>(d) : depthwise_tiles<T, size_, stride_, 8>(d);
  // clang-format off
  HFCA_WINDOW(3, 1) HFCA_WINDOW(3, 2) HFCA_WINDOW(5, 1) HFCA_WINDOW(5, 2) HFCA_WINDOW(7, 1) HFCA_WINDOW(9, 1)
#undef HFCA_WINDOW
  depthwise_of_any<T>(d);
  // clang-format on
}

inline void depthwise_row(const DepthwiseRow& d) { d.input_bf16 ? depthwise_of<uint16_t>(d) : depthwise_of<float>(d); }

inline void combine_pixels(const hfca::CombinedPixels& all) {
  hfca::CombinedPixels p = all;
  if (!p.other || p.other_apart != 0) p.channels *= p.pixels, p.pixels = 1;  // one row of numbers
  const hfca::Matrix input{const_cast<void*>(p.input), p.channels, p.input_bf16}, other{const_cast<void*>(p.other), 0, p.other_bf16},
      output{p.output, p.channels, p.output_bf16};
  with_activation(p.activation, [&](auto act) HFCA_INLINE {
    for (int64_t i = 0; i < p.pixels; ++i)
      for (int64_t c = 0; c < p.channels; c += Simd::width) {
        const int n = lanes_left(c, p.channels);
        Simd::Float x = load_any_n(input, i, c, n);
        if (p.other) {
          const Simd::Float y = load_any_n(other, 0, c, n);
          x = p.product ? Simd::mul(x, y) : Simd::add(x, y);
        }
        store_lanes<false>(output, i * p.channels + c, act(x), n);
      }
  });
}

// Sums of some pixels at a time: of thousands, one after another, the last ones would be rounded to the size of all before.
inline void add_pixels(const void* pixels, bool bf16, int64_t count, int64_t apart, int64_t channels, float* sums) {
  constexpr int64_t some = 128;
  const auto add = [&](const auto* x) HFCA_INLINE {
    for (int64_t c = 0; c < channels; c += Simd::width) {
      const int n = lanes_left(c, channels);
      for (int64_t first = 0; first < count; first += some) {
        Simd::Float four[4] = {Simd::zero(), Simd::zero(), Simd::zero(), Simd::zero()};
        const int64_t end = first + some < count ? first + some : count;
        int64_t i = first;
        for (; i + 4 <= end; i += 4)
          unroll<0, 4>([&](auto j) HFCA_INLINE { four[j] = Simd::add(four[j], load_as_float_n(x + (i + j) * apart + c, n)); });
        for (; i < end; ++i) four[0] = Simd::add(four[0], load_as_float_n(x + i * apart + c, n));
        const Simd::Float sum = Simd::add(Simd::add(four[0], four[1]), Simd::add(four[2], four[3]));
        Simd::store_n(sums + c, Simd::add(Simd::load_n(sums + c, n), sum), n);
      }
    }
  };
  bf16 ? add(static_cast<const uint16_t*>(pixels)) : add(static_cast<const float*>(pixels));
}

inline void scale_channels(const float* sums, float factor, int64_t channels, void* to, bool to_bf16) {
  const hfca::Matrix output{to, channels, to_bf16};
  for (int64_t c = 0; c < channels; c += Simd::width) {
    const int n = lanes_left(c, channels);
    store_lanes<false>(output, c, Simd::mul(Simd::load_n(sums + c, n), Simd::set1(factor)), n);
  }
}

constexpr hfca::PointwiseKernels pointwise_kernels() { return {&depthwise_row, &combine_pixels, &add_pixels, &scale_channels}; }

}  // namespace HFCA_TIER
