// Convolutions in groups of few channels, most often of one.
//
// A depthwise convolution multiplies each number that it loads by one row of the window's weights and adds to as many sums: some outputs
// that lie side by side are computed together, in registers, so that each pixel is loaded once per row of the window. Windows of the usual
// sizes are compiled as such. Pixels beside the image are not read: where a tile of outputs has such, it asks column by column. In wider
// groups (Xie et al. 2017, arXiv:1611.05431) the same is done for one channel of each group after another.
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
    HFCA_ACTIVATION(leaky_relu) HFCA_ACTIVATION(leaky_relu_tenth)
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

using hfca::GroupedRow;

// Outputs [first, first + count) of some channels from c on.
struct GroupedPlace {
  int64_t first;
  int count;
  int64_t c;
};

template <int tile>
HFCA_INLINE inline void store_outputs(const GroupedRow& d, const GroupedPlace& at, int n, Simd::Float (&sums)[tile]) {
  activate_sums(d.activation, sums);
  const int64_t start = at.first * d.channels + at.c;
  unroll<0, tile>([&](auto t) HFCA_INLINE {
    if (t >= at.count) return;
    const int64_t to = start + t * d.channels;
    const hfca::Matrix output{d.output, d.channels, d.output_bf16};
    n == Simd::width ? store_lanes<true>(output, to, sums[t], n) : store_lanes<false>(output, to, sums[t], n);
  });
}

// How the lanes of a vector of outputs read channel k of their group, for the three widths of groups.
//   first   where in a pixel they read, the outputs beginning at c
//   load    that channel, lane by lane, of the pixel from there on

// Each lane its own.
template <class T>
struct OwnChannel {
  using Number = T;
  explicit OwnChannel(const GroupedRow&) {}
  static constexpr int64_t channels() { return 1; }
  static int64_t first(int64_t c) { return c; }
  HFCA_INLINE static Simd::Float load(const T* pixel, int64_t) { return load_as_float(pixel); }
};

// All lanes that of one group, which is at least as wide as a vector.
template <class T>
class ChannelOfGroup {
 public:
  using Number = T;
  explicit ChannelOfGroup(const GroupedRow& d) : group_(d.group) {}
  int64_t channels() const { return group_; }
  int64_t first(int64_t c) const { return c / group_ * group_; }
  HFCA_INLINE static Simd::Float load(const T* pixel, int64_t k) { return Simd::set1(as_float(pixel[k])); }

 private:
  static float as_float(float x) { return x; }
  static float as_float(uint16_t x) { return hfca::widened(x); }
  int64_t group_;
};

// Lanes those of several groups, which begin where the vector does: they are a power of two wide.
template <class T>
class ChannelOfGroups {
 public:
  using Number = T;
  explicit ChannelOfGroups(const GroupedRow& d) : group_(d.group) {
    const auto first = static_cast<int32_t>(-group_);
    for (int32_t k = 0; k < group_; ++k)
      for (int32_t i = 0; i < Simd::width; ++i) lanes_[k][i] = (i & first) + k;
  }
  int64_t channels() const { return group_; }
  static int64_t first(int64_t c) { return c; }
  HFCA_INLINE Simd::Float load(const T* pixel, int64_t k) const { return Simd::pick(load_as_float(pixel), lanes_[k]); }

 private:
  int64_t group_;
  int32_t lanes_[Simd::width / 2][Simd::width];
};

// A window of that size and stride without dilation, all lanes. edge: some columns lie beside the image, or some outputs behind the row.
template <class Input, int size, int stride, int tile, bool edge>
HFCA_INLINE inline void grouped_tile(const GroupedRow& d, const GroupedPlace& at, const Input& input) {
  constexpr int columns = (tile - 1) * stride + size;
  const int64_t left = at.first * stride - d.padding, channels = input.channels();
  Simd::Float sums[tile];
  const Simd::Float bias = Simd::load(d.bias + at.c);
  unroll<0, tile>([&](auto t) HFCA_INLINE { sums[t] = bias; });
  const auto* x = static_cast<const typename Input::Number*>(d.input) + left * d.pixel_apart + input.first(at.c);
  const float* w = d.weight + at.c;
  for (int64_t i = 0; i < d.rows; ++i, x += d.row_apart, w += size * channels * d.channels)
    for (int64_t k = 0; k < channels; ++k) {
      Simd::Float weights[size];
      unroll<0, size>([&](auto j) HFCA_INLINE { weights[j] = Simd::load(w + (j * channels + k) * d.channels); });
      unroll<0, columns>([&](auto column) HFCA_INLINE {
        if (edge && static_cast<uint64_t>(left + column) >= static_cast<uint64_t>(d.width)) return;
        const Simd::Float value = input.load(x + column * d.pixel_apart, k);
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
inline void depthwise_tile_of_any(const GroupedRow& d, const GroupedPlace& at, int n) {
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
HFCA_INLINE inline void each_tile(const GroupedRow& d, const F& compute) {
  const int64_t reach = (tile - 1) * d.stride + (d.size - 1) * d.dilation + 1;
  for (int64_t first = 0; first < d.out_width; first += tile) {
    const int64_t left = first * d.stride - d.padding, rest = d.out_width - first;
    const bool edge = left < 0 || left + reach > d.width || rest < tile;
    compute(GroupedPlace{first, static_cast<int>(rest < tile ? rest : tile), 0}, edge);
  }
}

template <class Input, int size, int stride, int tile>
inline void grouped_tiles(const GroupedRow& d) {
  const Input input(d);
  each_tile<tile>(d, [&](GroupedPlace at, bool edge) HFCA_INLINE {
    const auto over_channels = [&](auto edged) HFCA_INLINE {
      for (at.c = d.begin; at.c < d.end; at.c += Simd::width) {
        if (at.c + Simd::width > d.end) at.c = d.end - Simd::width;  // what lies before it is computed once more
        grouped_tile<Input, size, stride, tile, edged != 0>(d, at, input);
      }
    };
    edge ? over_channels(Index<1>{}) : over_channels(Index<0>{});
  });
}

template <class T>
inline void depthwise_of_any(const GroupedRow& d) {
  each_tile<8>(d, [&](GroupedPlace at, bool) {
    for (at.c = d.begin; at.c < d.end; at.c += Simd::width) depthwise_tile_of_any<T, 8>(d, at, lanes_left(at.c, d.end));
  });
}

template <class T>
inline void depthwise_of(const GroupedRow& d) {
  if (d.dilation != 1 || d.end - d.begin < Simd::width) return depthwise_of_any<T>(d);
  // Images of 224 x 224 become some of 7, 14, 28, ... columns.
  const bool sevens = (d.out_width + 6) / 7 * 7 < (d.out_width + 7) / 8 * 8;
#define HFCA_WINDOW(size_, stride_)           \
  if (d.size == size_ && d.stride == stride_) \
    return sevens ? grouped_tiles<OwnChannel<T>, size_, stride_, 7>(d) : grouped_tiles<OwnChannel<T>, size_, stride_, 8>(d);
  // clang-format off
  HFCA_WINDOW(3, 1) HFCA_WINDOW(3, 2) HFCA_WINDOW(5, 1) HFCA_WINDOW(5, 2) HFCA_WINDOW(7, 1) HFCA_WINDOW(9, 1)
#undef HFCA_WINDOW
  depthwise_of_any<T>(d);
  // clang-format on
}

// Any window and any number of lanes, output by output.
template <class T>
inline void grouped_of_any(const GroupedRow& d) {
  const T* const x = static_cast<const T*>(d.input);
  for (int64_t output = 0; output < d.out_width; ++output)
    for (int64_t c = d.begin; c < d.end; c += Simd::width) {
      const int n = lanes_left(c, d.end);
      Simd::Float sums[1] = {Simd::load_n(d.bias + c, n)};
      for (int64_t i = 0; i < d.rows; ++i)
        for (int64_t j = 0; j < d.size; ++j) {
          const int64_t column = output * d.stride - d.padding + j * d.dilation;
          if (column < 0 || column >= d.width) continue;
          const T* const pixel = x + i * d.row_apart + column * d.pixel_apart;
          for (int64_t k = 0; k < d.group; ++k) {
            alignas(64) float values[Simd::width] = {};
            for (int lane = 0; lane < n; ++lane) values[lane] = first_of(load_as_float_n(pixel + (c + lane) / d.group * d.group + k, 1));
            const Simd::Float weight = Simd::load_n(d.weight + ((i * d.size + j) * d.group + k) * d.channels + c, n);
            sums[0] = Simd::fma(Simd::load(values), weight, sums[0]);
          }
        }
      store_outputs(d, {output, 1, c}, n, sums);
    }
}

template <class T>
inline void grouped_of(const GroupedRow& d) {
  const bool fits = d.group < Simd::width ? Simd::width % d.group == 0 : d.group % Simd::width == 0;
  if (d.dilation != 1 || d.size != 3 || d.stride > 2 || !fits || d.end - d.begin < Simd::width) return grouped_of_any<T>(d);
  if (d.group >= Simd::width) {
    d.stride == 1 ? grouped_tiles<ChannelOfGroup<T>, 3, 1, 7>(d) : grouped_tiles<ChannelOfGroup<T>, 3, 2, 7>(d);
  } else {
    d.stride == 1 ? grouped_tiles<ChannelOfGroups<T>, 3, 1, 7>(d) : grouped_tiles<ChannelOfGroups<T>, 3, 2, 7>(d);
  }
}

template <class T>
inline void row_of(const GroupedRow& d) {
  d.group == 1 ? depthwise_of<T>(d) : grouped_of<T>(d);
}

inline void grouped_row(const GroupedRow& d) { d.input_bf16 ? row_of<uint16_t>(d) : row_of<float>(d); }

}  // namespace HFCA_TIER
