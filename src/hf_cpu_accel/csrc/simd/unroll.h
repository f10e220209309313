// Loops whose index is a compile-time constant. `#pragma GCC unroll` comes too late for gcc to keep an array of accumulators in
// registers: it leaves a dead store per multiply, which halves the rate.
#pragma once

#define HFCA_INLINE __attribute__((always_inline))

namespace HFCA_TIER {

template <int value>
struct Index {
  static constexpr int number = value;
  constexpr operator int() const { return value; }
};

// f(Index<begin>), ..., f(Index<end - 1>)
template <int begin, int end, class F>
HFCA_INLINE inline void unroll(F&& f) {
  if constexpr (begin < end) {
    f(Index<begin>{});
    unroll<begin + 1, end>(f);
  }
}

}  // namespace HFCA_TIER
