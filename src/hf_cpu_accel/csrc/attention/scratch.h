// The memory of an attention task, carved from one array.
#pragma once
#include "pack_heads.h"

namespace HFCA_TIER {

constexpr int64_t key_block = 256;

// Hands out parts of `memory`, cache line by cache line; without memory it only counts.
struct Carver {
  float* memory;
  int64_t floats = 0;

  template <class T = float>
  T* take(int64_t count) {  // elements of four bytes
    const int64_t at = floats;
    floats += round_up(count, 16);
    return memory ? reinterpret_cast<T*>(memory + at) : nullptr;
  }
};

}  // namespace HFCA_TIER
