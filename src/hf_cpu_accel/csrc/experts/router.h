// From a router's logits to the experts that each token goes to, and from there to the tokens that each expert gets.
#pragma once
#include <algorithm>
#include <cmath>

#include "../gemm/gemm.h"

namespace hfca {

constexpr int64_t max_top_k = 64;

// The scores' way to weights: see ops/decoder/parts.py.
struct Router {
  Gemm logits;  // the weight side: a feature per expert, and one more for the gate of the shared expert if `gates_shared`
  Scoring scoring = Scoring::softmax;
  const float* choice_bias = nullptr;  // [experts], added to the scores by which experts are chosen; may be null
  bool renormalize = false, gates_shared = false;
  float scale = 1.0f;
};

inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// The `top_k` experts with the highest scores and their weights, of one token's logits. These are overwritten, by the gate of the shared
// expert where its logit was.
inline void choose_experts(const Router& router, float* logits, int64_t experts, int64_t top_k, int32_t* expert, float* weight) {
  float* const score = logits;
  if (router.scoring == Scoring::softmax) {
    const float highest = *std::max_element(logits, logits + experts);
    float sum = 0.0f;
    for (int64_t e = 0; e < experts; ++e) sum += score[e] = std::exp(logits[e] - highest);
    for (int64_t e = 0; e < experts; ++e) score[e] /= sum;
  } else {
    for (int64_t e = 0; e < experts; ++e) score[e] = sigmoid(logits[e]);
  }
  // The best so far in falling order; NaN is never better, so that the first expert stays and the token becomes NaN.
  std::fill_n(expert, top_k, 0);
  std::fill_n(weight, top_k, -INFINITY);
  for (int64_t e = 0; e < experts; ++e) {
    const float value = score[e] + (router.choice_bias ? router.choice_bias[e] : 0.0f);
    int64_t j = top_k;
    for (; j > 0 && value > weight[j - 1]; --j)
      if (j < top_k) expert[j] = expert[j - 1], weight[j] = weight[j - 1];
    if (j < top_k) expert[j] = static_cast<int32_t>(e), weight[j] = value;
  }
  float sum = 0.0f;
  for (int64_t j = 0; j < top_k; ++j) sum += weight[j] = score[expert[j]];
  const float factor = router.renormalize ? router.scale / sum : router.scale;
  for (int64_t j = 0; j < top_k; ++j) weight[j] *= factor;
  if (router.gates_shared) logits[experts] = sigmoid(logits[experts]);
}

// Which experts the tokens go to, and the slots [tokens * top_k] at which they stand when they are sorted by expert.
struct Assignment {
  int64_t tokens = 0, top_k = 0, experts = 0;
  int32_t* expert = nullptr;  // [tokens][top_k]
  float* weight = nullptr;    // [tokens][top_k]
  int32_t* slot = nullptr;   // [tokens][top_k]
  int32_t* source = nullptr;  // [slots]: the row of the input
  int32_t* begin = nullptr;   // [experts + 1]: the first slot of each expert

  int64_t slots() const { return tokens * top_k; }
};

// From `expert` to `slot`, `source` and `begin`. rows: where the tokens lie in the input, null for one after another.
inline void sort_by_expert(const Assignment& a, const int32_t* rows) {
  std::fill_n(a.begin, a.experts + 1, 0);
  for (int64_t i = 0; i < a.slots(); ++i) ++a.begin[a.expert[i] + 1];
  for (int64_t e = 0; e < a.experts; ++e) a.begin[e + 1] += a.begin[e];
  for (int64_t i = 0; i < a.slots(); ++i) {
    const int32_t slot = a.slot[i] = a.begin[a.expert[i]]++;
    a.source[slot] = rows ? rows[i / a.top_k] : static_cast<int32_t>(i / a.top_k);
  }
  for (int64_t e = a.experts; e > 0; --e) a.begin[e] = a.begin[e - 1];
  a.begin[0] = 0;
}

}  // namespace hfca
