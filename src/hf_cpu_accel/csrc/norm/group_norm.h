// What a tier's group norm offers and is given: plain data, no torch.
//
//   output = (x - mean) / sqrt(var + eps) * weight + bias, then SiLU if asked for        (Wu & He 2018, arXiv:1803.08494)
//
// with mean and variance of all pixels of the channels of a group, in one image.
#pragma once
#include "../gemm/gemm.h"

namespace hfca {

struct GroupNorm {
  int64_t channels = 0, groups = 0, pixels = 0;
  const void* input = nullptr;  // dense, [images, channels, pixels] for planes, [images, pixels, channels] for the others
  void* output = nullptr;       // of the same layout
  bool bf16 = false, silu = false;
  Array weight, bias;  // [channels]; data may be null: ones and zeros
  float eps = 0.0f;
};

// Per channel of one image, 4 * channels float32: mean of its group, 1 / deviation * weight, bias; the last part is scratch.
constexpr int group_norm_vectors = 4;
// Per channel of one chunk of pixels: their mean in two parts, and the sum of squares around the first.
constexpr int group_norm_moments = 3;
// Pixels whose moments are taken at once: few enough that their second reading comes from the cache.
constexpr int64_t group_norm_chunk = 32;

struct GroupNormKernels {
  // Groups [begin, end) of all images, where the pixels of a channel lie together; `buffer` holds group_norm_vectors * channels.
  void (*planes)(const GroupNorm&, int64_t begin, int64_t end, float* buffer);
  // Where the channels of a pixel lie together: the moments [group_norm_moments, channels] of pixels [begin, end) of `image`;
  void (*moments)(const GroupNorm&, int64_t image, int64_t begin, int64_t end, float* moments);
  // those of all chunks of an image, [chunks, group_norm_moments, channels], made to `vectors` [group_norm_vectors, channels];
  void (*combine)(const GroupNorm&, const float* moments, float* vectors);
  // and pixels [begin, end) of `image` normalized with them.
  void (*apply)(const GroupNorm&, int64_t image, int64_t begin, int64_t end, const float* vectors);
};

}  // namespace hfca
