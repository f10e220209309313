// The memory of an attention task, carved from one array.
#pragma once
#include "pack_heads.h"

namespace HFCA_TIER {

constexpr int64_t key_block = 256;
// Of a window that hides more keys from a tile of rows than the smaller blocks cost: those that it hides whole are not computed.
constexpr int64_t window_block = 64, most_narrow = 2 * key_block + 1;

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

// Keys in the order in which an arithmetic reads them, 32 of `words` words each in a chunk; where it scales them, by what.
struct PackedKeys {
  uint32_t* data;
  int64_t words;
  float *scale, *offset;  // [keys]

  PackedKeys(Carver& memory, int64_t keys, int64_t words_of_key)
      : data(memory.take<uint32_t>(round_up(keys, chunk) * words_of_key)),
        words(words_of_key),
        scale(memory.take(round_up(keys, chunk))),
        offset(memory.take(round_up(keys, chunk))) {}
  PackedKeys from(int64_t key) const {  // a multiple of 32
    PackedKeys rest = *this;
    rest.data += key * words, rest.scale += key, rest.offset += key;
    return rest;
  }
};

// Queries likewise, tile by tile.
struct PackedQueries {
  uint32_t* data;
  int64_t words;
  float* scale;  // [rows]

  PackedQueries(Carver& memory, int64_t rows, int64_t words_of_row)
      : data(memory.take<uint32_t>(rows * words_of_row)), words(words_of_row), scale(memory.take(rows)) {}
  PackedQueries from(int64_t row) const {  // the first of a tile
    PackedQueries rest = *this;
    rest.data += row * words, rest.scale += row;
    return rest;
  }
};

}  // namespace HFCA_TIER
