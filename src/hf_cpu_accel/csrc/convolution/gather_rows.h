// The kernels of gather.h.
#pragma once
#include "../gemm/pack.h"
#include "gather.h"

namespace HFCA_TIER {

inline void store_from_float(float* p, Simd::Float x, int n) { Simd::store_n(p, x, n); }
inline void store_from_float(uint16_t* p, Simd::Float x, int n) { Simd::store_bf16_n(p, x, n); }

// f(from, to) with pointers to the types of the elements.
template <class F>
HFCA_INLINE inline void typed_pair(const void* from, bool from_bf16, void* to, bool to_bf16, const F& f) {
  const auto with = [&](auto* out)
                        HFCA_INLINE { from_bf16 ? f(static_cast<const uint16_t*>(from), out) : f(static_cast<const float*>(from), out); };
  to_bf16 ? with(static_cast<uint16_t*>(to)) : with(static_cast<float*>(to));
}

inline int lanes_left(int64_t at, int64_t end) { return end - at < Simd::width ? static_cast<int>(end - at) : Simd::width; }

// One channel of n pixels, in the dtype of the output.
template <class T, class Out>
HFCA_INLINE inline void copy_channel(const T* first, int64_t pixel_apart, int n, Out* to) {
  if (pixel_apart == 1) return store_from_float(to, load_as_float_n(first, n), n);
  alignas(64) float gathered[Simd::width];
  for (int j = 0; j < n; ++j) gathered[j] = first_of(load_as_float_n(first + j * pixel_apart, 1));
  store_from_float(to, Simd::load_n(gathered, n), n);
}

inline void copy_pixels(const hfca::PixelRow& from, int64_t pixels, int64_t channels, void* to, bool to_bf16) {
  typed_pair(from.data, from.bf16, to, to_bf16, [&](const auto* x, auto* out) HFCA_INLINE {
    if (from.channel_apart == 1 && from.pixel_apart == channels && from.channels == channels) {
      for (int64_t i = 0; i < pixels * channels; i += Simd::width) {
        const int n = lanes_left(i, pixels * channels);
        store_from_float(out + i, load_as_float_n(x + i, n), n);
      }
      return;
    }
    // Some pixels of each channel, and then side by side.
    using Out = std::remove_reference_t<decltype(*out)>;
    constexpr int four = 4;  // channels of two bytes, which are one number of 64 bits
    Out some[four][Simd::width] = {};
    for (int64_t i = 0; i < pixels; i += Simd::width) {
      const int n = lanes_left(i, pixels);
      const auto load = [&](int64_t c, Out* channel)
                            HFCA_INLINE { copy_channel(x + i * from.pixel_apart + c * from.channel_apart, from.pixel_apart, n, channel); };
      if (sizeof(Out) == 2 && channels == four) {
        for (int64_t c = 0; c < from.channels; ++c) load(c, some[c]);
        uint64_t whole[Simd::width];
        for (int j = 0; j < Simd::width; ++j) {
          whole[j] = 0;
          for (int c = 0; c < four; ++c) whole[j] |= static_cast<uint64_t>(some[c][j]) << (16 * c);
        }
        std::memcpy(out + i * four, whole, static_cast<size_t>(n) * sizeof(uint64_t));
        continue;
      }
      for (int64_t c = 0; c < channels; ++c) {
        if (c < from.channels) load(c, some[0]);
        for (int j = 0; j < n; ++j) out[(i + j) * channels + c] = c < from.channels ? some[0][j] : Out{};
      }
    }
  });
}

inline void gather_pieces(const hfca::Pieces& pieces, char* to) {
  const char* row = pieces.first;
  for (int64_t i = 0; i < pieces.rows; ++i, row += pieces.rows_apart)
    for (int64_t j = 0; j < pieces.count; ++j, to += pieces.bytes)
      for (int64_t at = 0; at < pieces.bytes; at += hfca::copied_bytes)
        std::memcpy(to + at, row + j * pieces.apart + at, static_cast<size_t>(hfca::copied_bytes));
}

inline void largest_pixels(const void* const* from, bool from_bf16, int64_t count, int64_t channels, void* to, bool to_bf16, float* seen) {
  Range range;
  if (seen) range = {Simd::load(seen), Simd::load(seen + hfca::range_numbers / 2)};
  typed_pair(from[0], from_bf16, to, to_bf16, [&](const auto* first, auto* out) HFCA_INLINE {
    for (int64_t c = 0; c < channels; c += Simd::width) {
      const int n = lanes_left(c, channels);
      Simd::Float most = load_as_float_n(first + c, n);
      for (int64_t i = 1; i < count; ++i) {
        const Simd::Float x = load_as_float_n(static_cast<decltype(first)>(from[i]) + c, n);
        most = Simd::where_equal(x, x, Simd::max(x, most), x);  // max gives its second where one is NaN
      }
      store_from_float(out + c, most, n);
      if (seen) range.add(most);
    }
  });
  if (seen) Simd::store(seen, range.low), Simd::store(seen + hfca::range_numbers / 2, range.high);
}

inline void mean_pixels(const void* const* from, bool from_bf16, int64_t count, int64_t channels, float factor, void* to, bool to_bf16) {
  typed_pair(from[0], from_bf16, to, to_bf16, [&](const auto* first, auto* out) HFCA_INLINE {
    for (int64_t c = 0; c < channels; c += Simd::width) {
      const int n = lanes_left(c, channels);
      Simd::Float sum = load_as_float_n(first + c, n);
      for (int64_t i = 1; i < count; ++i) sum = Simd::add(sum, load_as_float_n(static_cast<decltype(first)>(from[i]) + c, n));
      store_from_float(out + c, Simd::mul(sum, Simd::set1(factor)), n);
    }
  });
}

inline void largest_bytes(const void* const* from, int64_t count, int64_t channels, void* to) {
  auto* const out = static_cast<uint8_t*>(to);
  std::memcpy(out, from[0], static_cast<size_t>(channels));
  for (int64_t i = 1; i < count; ++i) {
    const auto* const x = static_cast<const uint8_t*>(from[i]);
    for (int64_t c = 0; c < channels; ++c) out[c] = x[c] > out[c] ? x[c] : out[c];
  }
}

constexpr hfca::GatherKernels gather_kernels() { return {&copy_pixels, &gather_pieces, &largest_pixels, &mean_pixels, &largest_bytes}; }

}  // namespace HFCA_TIER
