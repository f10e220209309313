// Multi-scale deformable attention (Zhu et al. 2020, arXiv:2010.04159): what a query gets of each head is a weighted sum of values at a
// few points of several images, each interpolated from the four pixels around it. Plain data, no torch.
#pragma once
#include "../gemm/gemm.h"

namespace hfca {

struct ImageLevel {
  int64_t height = 0, width = 0;
  int64_t first = 0;   // its first pixel among those of all levels
  int64_t points = 0;  // of each query and head
};

struct DeformableAttention {
  const void* value = nullptr;  // [batch, pixels, heads, features], features dense; strides in elements
  void* output = nullptr;       // [batch, queries, heads, features]
  bool bf16 = false;            // both
  int64_t value_strides[3] = {};
  const float* points = nullptr;   // [batch, queries, heads, points, 2]: x and y from 0 to 1 across an image
  const float* weights = nullptr;  // [batch, queries, heads, points]
  const ImageLevel* levels = nullptr;
  int64_t level_count = 0, queries = 0, heads = 0, features = 0, points_of_head = 0;

  int64_t corners() const { return 4 * points_of_head; }
};

// Four for each point.
struct Corner {
  const void* values;
  float weight;
};

// Queries [begin, end) of batch * queries. buffer: `corners` of them.
using DeformableAttentionKernel = void (*)(const DeformableAttention&, int64_t begin, int64_t end, Corner* buffer);

}  // namespace hfca
