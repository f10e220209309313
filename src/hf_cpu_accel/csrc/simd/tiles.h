// AMX: eight tiles of up to 16 rows of 64 bytes, and their products. Tiles has two implementations, chosen when a tier is compiled: the
// instructions, and with HFCA_EMULATED_TILES what they do (emulated_tiles.h), for machines without them.
//
//   save, configure, release   the shapes of all tiles of this thread; configure() clears the tiles
//   zero, load, load_once, store
//   add_bytes<to, a, b>        to[m][n] += sum over k and j of a[m][4k + j] * b[k][4n + j]: uint8 by int8, int32 sums
//   add_bf16<to, a, b>         the same of pairs of bfloat16, float32 sums, denormals are zero
#pragma once
#include <cstdint>

namespace HFCA_TIER {

constexpr int tile_bytes = 1024, tile_row_bytes = 64, most_tile_rows = 16;

// As LDTILECFG reads it. Palette 0: no tiles are in use.
struct alignas(64) TileShapes {
  uint8_t palette = 0, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int count, int bytes = tile_row_bytes) {
    palette = 1, row_bytes[tile] = static_cast<uint16_t>(bytes), rows[tile] = static_cast<uint8_t>(count);
  }
};
static_assert(sizeof(TileShapes) == 64, "what the instructions read and write");

}  // namespace HFCA_TIER

#if defined(HFCA_EMULATED_TILES)
#include "emulated_tiles.h"
#else

namespace HFCA_TIER {

// Not the compiler's intrinsics: those are macros that paste the number of the tile into the instruction, and do not say that they read
// and write memory.
struct Tiles {
  static void save(TileShapes& to) { asm volatile("sttilecfg %0" : "=m"(to)); }
  static void configure(const TileShapes& shapes) { asm volatile("ldtilecfg %0" : : "m"(shapes)); }
  static void release() { asm volatile("tilerelease"); }

  template <int tile>
  static void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(tile));
  }
  template <int tile>
  static void load(const void* p, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(tile) : "memory");
  }
  // What is not needed again soon, and shall leave the nearest cache to what is.
  template <int tile>
  static void load_once(const void* p, int64_t stride) {
    asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(tile) : "memory");
  }
  template <int tile>
  static void store(void* p, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(stride), "i"(tile) : "memory");
  }
  template <int to, int a, int b>
  static void add_bytes() {
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(to), "i"(a), "i"(b));
  }
  template <int to, int a, int b>
  static void add_bf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(to), "i"(a), "i"(b));
  }
};

}  // namespace HFCA_TIER

#endif
