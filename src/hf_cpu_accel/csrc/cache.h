// Size of the cache that a thread has to itself, from which blocks of work are cut.
#pragma once
#include <cstdint>

#if defined(__linux__)
#include <unistd.h>
#endif

namespace hfca {

inline int64_t level2_bytes() {
  constexpr int64_t usual = 1 << 20;
#if defined(_SC_LEVEL2_CACHE_SIZE)
  static const int64_t told = sysconf(_SC_LEVEL2_CACHE_SIZE);
  return told >= usual / 4 ? told : usual;
#else
  return usual;
#endif
}

}  // namespace hfca
