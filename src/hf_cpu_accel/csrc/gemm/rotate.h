// The rotation between the input and the weight of an int8 product: it spreads the few features that are large in every row of a
// transformer over others, so that they no longer set the step that all features are rounded with (Ashkboos et al. 2024, QuaRot,
// arXiv:2404.00456). rotation.py defines it and rotates the weights.
#pragma once
#include "../simd/simd.h"
#include "../simd/unroll.h"

namespace HFCA_TIER {

constexpr int rotated_features = 128;  // of one block; features behind the last whole block are only multiplied by rotation_scale
constexpr int rotated_vectors = rotated_features / Simd::width;
constexpr float rotation_scale = 4.0f;  // by which the rotation makes a row longer

// a, b, c, d times [1 1 1 -1; 1 1 -1 1; 1 -1 1 1; -1 1 1 1].
inline void rotate4(Simd::Float& a, Simd::Float& b, Simd::Float& c, Simd::Float& d) {
  const Simd::Float ab = Simd::add(a, b), a_b = Simd::sub(a, b), cd = Simd::add(c, d), c_d = Simd::sub(c, d);
  a = Simd::add(ab, c_d);
  b = Simd::sub(ab, c_d);
  c = Simd::add(cd, a_b);
  d = Simd::sub(cd, a_b);
}

// One block in place: first over the features that are 32 apart, then over those that are 8 apart.
inline void rotate_block(Simd::Float (&x)[rotated_vectors]) {
  constexpr int apart = rotated_vectors / 4;
  unroll<0, apart>([&](auto i) HFCA_INLINE { rotate4(x[i], x[i + apart], x[i + 2 * apart], x[i + 3 * apart]); });
  unroll<0, 4>([&](auto i) HFCA_INLINE {
#if defined(HFCA_SIMD_AVX512)  // two of the four in one vector: [a b] and [c d]
    const Simd::Float ab = x[2 * i], cd = x[2 * i + 1], ba = Simd::swap_halves(ab), dc = Simd::swap_halves(cd);
    x[2 * i] = Simd::add(Simd::add(ab, ba), Simd::sub(cd, dc));
    x[2 * i + 1] = Simd::add(Simd::add(cd, dc), Simd::sub(ab, ba));
#else
    rotate4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
#endif
  });
}

}  // namespace HFCA_TIER
