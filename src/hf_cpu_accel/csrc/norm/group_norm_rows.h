// Group norm in both layouts of images. Where the pixels of a channel lie together a group is one long row, as of a layer norm. Where
// the channels of a pixel lie together the vectors run over channels, however few a group has: each channel's moments are taken by
// chunks of pixels and combined (Chan, Golub & LeVeque 1983), which loses nothing to cancellation and reads memory once.
#pragma once
#include "group_norm.h"
#include "norm_rows.h"

namespace HFCA_TIER {

inline const void* element(const void* data, int64_t index, bool bf16) {
  return static_cast<const char*>(data) + index * static_cast<int64_t>(bf16 ? sizeof(uint16_t) : sizeof(float));
}
inline void* element(void* data, int64_t index, bool bf16) {
  return const_cast<void*>(element(static_cast<const void*>(data), index, bf16));
}

template <bool silu>
inline Float finished(Float x) {
  return silu ? Simd::mul(x, sigmoid(x)) : x;
}

template <bool bf16, bool silu>
inline void group_norm_planes(const hfca::GroupNorm& norm, int64_t begin, int64_t end, float* buffer) {
  const int64_t wide = norm.channels / norm.groups, count = wide * norm.pixels;
  const float* weight = as_float32(norm.weight, norm.channels, 1.0f, buffer);
  const float* bias = as_float32(norm.bias, norm.channels, 0.0f, buffer + norm.channels);
  for (int64_t unit = begin; unit < end; ++unit) {
    const void* x = element(norm.input, unit * count, bf16);
    void* y = element(norm.output, unit * count, bf16);
    const float n = static_cast<float>(count);
    const Float high = Simd::set1(sum_columns(count, [=](int64_t j, int k) HFCA_INLINE { return load_columns<bf16>(x, j, k); }) / n);
    const auto above = [=](int64_t j, int k) HFCA_INLINE { return Simd::sub(load_columns<bf16>(x, j, k), high); };
    const Float low = Simd::set1(sum_columns(count, above) / n);
    const float squares = sum_columns(count, [=](int64_t j, int k) HFCA_INLINE {
      const Float value = Simd::sub(above(j, k), low);
      return Simd::mul(value, value);
    });
    const float inverse = 1.0f / __builtin_sqrtf(squares / n + norm.eps);
    const int64_t first = unit % norm.groups * wide;
    for (int64_t c = 0; c < wide; ++c) {
      const Float scale = Simd::set1(inverse * weight[first + c]), shift = Simd::set1(bias[first + c]);
      const void* plane = element(x, c * norm.pixels, bf16);
      void* target = element(y, c * norm.pixels, bf16);
      each_vector(norm.pixels, [=](int64_t j, int k) HFCA_INLINE {
        const Float value = Simd::sub(Simd::sub(load_columns<bf16>(plane, j, k), high), low);
        store_columns<bf16>(target, j, k, finished<silu>(Simd::fma(value, scale, shift)));
      });
    }
  }
}

template <bool bf16>
inline void chunk_moments(const hfca::GroupNorm& norm, int64_t image, int64_t begin, int64_t end, float* moments) {
  const void* x = element(norm.input, (image * norm.pixels + begin) * norm.channels, bf16);
  const int64_t count = end - begin, channels = norm.channels;
  const Float share = Simd::set1(1.0f / static_cast<float>(count));
  each_vector(channels, [=](int64_t j, int k) HFCA_INLINE {
    const auto load = [=](int64_t pixel) HFCA_INLINE { return load_columns<bf16>(x, pixel * channels + j, k); };
    Float sum = Simd::zero(), rest = Simd::zero(), squares = Simd::zero();
    for (int64_t pixel = 0; pixel < count; ++pixel) sum = Simd::add(sum, load(pixel));
    const Float mean = Simd::mul(sum, share);
    for (int64_t pixel = 0; pixel < count; ++pixel) {
      const Float value = Simd::sub(load(pixel), mean);
      rest = Simd::add(rest, value);
      squares = Simd::fma(value, value, squares);
    }
    store_columns<false>(moments, j, k, mean);
    store_columns<false>(moments, channels + j, k, Simd::mul(rest, share));
    store_columns<false>(moments, 2 * channels + j, k, squares);
  });
}

inline void group_norm_combine(const hfca::GroupNorm& norm, const float* moments, float* vectors) {
  const int64_t channels = norm.channels, wide = channels / norm.groups;
  float *mean = vectors, *scale = vectors + channels, *scratch = vectors + 3 * channels;
  const float* weight = as_float32(norm.weight, channels, 1.0f, scratch);
  const float* bias = as_float32(norm.bias, channels, 0.0f, vectors + 2 * channels);
  for (int64_t j = 0; j < channels; ++j) vectors[2 * channels + j] = bias[j];
  for (int64_t first = 0; first < channels; first += wide) {
    double total = 0.0, squares = 0.0, count = 0.0;
    for (int64_t begin = 0, chunk = 0; begin < norm.pixels; begin += hfca::group_norm_chunk, ++chunk) {
      const int64_t rest = norm.pixels - begin;
      const double more = static_cast<double>(rest < hfca::group_norm_chunk ? rest : hfca::group_norm_chunk);
      const float* its = moments + chunk * hfca::group_norm_moments * channels;
      for (int64_t j = first; j < first + wide; ++j) {
        const double low = its[channels + j], delta = static_cast<double>(its[j]) + low - total;
        squares += static_cast<double>(its[2 * channels + j]) - low * low * more + delta * delta * count * more / (count + more);
        count += more;
        total += delta * more / count;
      }
    }
    const float inverse = 1.0f / __builtin_sqrtf(static_cast<float>(squares / count) + norm.eps);
    for (int64_t j = first; j < first + wide; ++j) {
      mean[j] = static_cast<float>(total);
      scale[j] = inverse * weight[j];
      // What the mean loses as one float32, the bias gets back.
      vectors[2 * channels + j] += static_cast<float>(static_cast<double>(mean[j]) - total) * scale[j];
    }
  }
}

template <bool bf16, bool silu>
inline void group_norm_apply(const hfca::GroupNorm& norm, int64_t image, int64_t begin, int64_t end, const float* vectors) {
  const int64_t channels = norm.channels;
  for (int64_t pixel = image * norm.pixels + begin; pixel < image * norm.pixels + end; ++pixel) {
    const void* x = element(norm.input, pixel * channels, bf16);
    void* y = element(norm.output, pixel * channels, bf16);
    each_vector(channels, [=](int64_t j, int k) HFCA_INLINE {
      const Float value = Simd::sub(load_columns<bf16>(x, j, k), load_columns<false>(vectors, j, k));
      const Float scale = load_columns<false>(vectors, channels + j, k), shift = load_columns<false>(vectors, 2 * channels + j, k);
      store_columns<bf16>(y, j, k, finished<silu>(Simd::fma(value, scale, shift)));
    });
  }
}

inline void planes(const hfca::GroupNorm& norm, int64_t begin, int64_t end, float* buffer) {
  const auto run = norm.bf16 ? (norm.silu ? &group_norm_planes<true, true> : &group_norm_planes<true, false>)
                             : (norm.silu ? &group_norm_planes<false, true> : &group_norm_planes<false, false>);
  run(norm, begin, end, buffer);
}

inline void moments(const hfca::GroupNorm& norm, int64_t image, int64_t begin, int64_t end, float* into) {
  (norm.bf16 ? &chunk_moments<true> : &chunk_moments<false>)(norm, image, begin, end, into);
}

inline void apply_moments(const hfca::GroupNorm& norm, int64_t image, int64_t begin, int64_t end, const float* vectors) {
  const auto run = norm.bf16 ? (norm.silu ? &group_norm_apply<true, true> : &group_norm_apply<true, false>)
                             : (norm.silu ? &group_norm_apply<false, true> : &group_norm_apply<false, false>);
  run(norm, image, begin, end, vectors);
}

constexpr hfca::GroupNormKernels group_norm_kernels() { return {&planes, &moments, &group_norm_combine, &apply_moments}; }

}  // namespace HFCA_TIER
