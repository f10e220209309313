// AMX as Intel's manual has it, on AVX-512: what a product of tiles gives, bit for bit, and where the hardware would refuse it. Bochs 3.1
// gives the same for the same data, denormals among them.
#pragma once
#include <immintrin.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace HFCA_TIER {

struct Tiles {
  static void save(TileShapes& to) { to = state().shapes; }
  static void configure(const TileShapes& shapes) {
    State& now = state();
    now.shapes = shapes;
    check(shapes.palette == 1 && shapes.start_row == 0, "configure: palette");
    for (int tile = 0; tile < tiles; ++tile)
      check(shapes.row_bytes[tile] <= tile_row_bytes && shapes.rows[tile] <= most_tile_rows, "configure: shape");
    std::memset(now.words, 0, sizeof(now.words));
  }
  static void release() { state().shapes = TileShapes{}; }

  template <int tile>
  static void zero() {
    used(tile);
    std::memset(state().words[tile], 0, tile_bytes);
  }
  template <int tile>
  static void load(const void* p, int64_t stride) {
    used(tile);
    State& now = state();
    for (int row = 0; row < now.shapes.rows[tile]; ++row)
      std::memcpy(now.words[tile][row], static_cast<const char*>(p) + row * stride, now.shapes.row_bytes[tile]);
  }
  template <int tile>
  static void load_once(const void* p, int64_t stride) {
    load<tile>(p, stride);
  }
  template <int tile>
  static void store(void* p, int64_t stride) {
    used(tile);
    const State& now = state();
    for (int row = 0; row < now.shapes.rows[tile]; ++row)
      std::memcpy(static_cast<char*>(p) + row * stride, now.words[tile][row], now.shapes.row_bytes[tile]);
  }

  template <int to, int a, int b>
  static void add_bytes() {
    fit(to, a, b);
    State& now = state();
    for (int row = 0; row < now.shapes.rows[to]; ++row) {
      __m512i sum = _mm512_load_si512(now.words[to][row]);
      for (int k = 0; k < now.shapes.rows[b]; ++k)
        sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi32(static_cast<int>(now.words[a][row][k])), _mm512_load_si512(now.words[b][k]));
      if (faulty()) sum = _mm512_add_epi32(sum, _mm512_set1_epi32(1));
      _mm512_store_si512(now.words[to][row], sum);
    }
  }

  // The even and the odd products apart, by FMA, rounded to the nearest even; then even + odd; then that + the tile. Denormals are zero
  // on both ends, whatever MXCSR says.
  template <int to, int a, int b>
  static void add_bf16() {
    fit(to, a, b);
    constexpr unsigned zero_denormals_and_mask_all = 0x9FC0;
    const unsigned before = _mm_getcsr();
    _mm_setcsr(zero_denormals_and_mask_all);
    State& now = state();
    const __m512i odd_half = _mm512_set1_epi32(static_cast<int>(0xFFFF0000u));
    const auto even_of = [](__m512i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); };
    const auto odd_of = [&](__m512i x) { return _mm512_castsi512_ps(_mm512_and_si512(x, odd_half)); };
    for (int row = 0; row < now.shapes.rows[to]; ++row) {
      __m512 even = _mm512_setzero_ps(), odd = even;
      for (int k = 0; k < now.shapes.rows[b]; ++k) {
        const __m512i x = _mm512_set1_epi32(static_cast<int>(now.words[a][row][k])), y = _mm512_load_si512(now.words[b][k]);
        even = _mm512_fmadd_ps(even_of(x), even_of(y), even);
        odd = _mm512_fmadd_ps(odd_of(x), odd_of(y), odd);
      }
      _mm512_store_ps(now.words[to][row], _mm512_add_ps(_mm512_load_ps(now.words[to][row]), _mm512_add_ps(even, odd)));
    }
    _mm_setcsr(before);
  }

 private:
  static constexpr int tiles = 8;

  struct State {
    TileShapes shapes;
    alignas(64) uint32_t words[tiles][most_tile_rows][tile_row_bytes / 4];
  };
  static State& state() {
    static thread_local State state;
    return state;
  }
  // For the test of what happens where tiles give something else than they should.
  static bool faulty() {
    static const bool wrong = std::getenv("HF_CPU_ACCEL_FAULTY_TILES") != nullptr;
    return wrong;
  }

  static void check(bool right, const char* what) {
    if (right) return;
    std::fprintf(stderr, "hf_cpu_accel: emulated tiles: %s\n", what);
    std::abort();  // where the hardware raises #UD or #GP
  }
  static void used(int tile) {
    const TileShapes& shapes = state().shapes;
    check(shapes.palette == 1 && shapes.rows[tile] > 0 && shapes.row_bytes[tile] > 0, "a tile without a shape");
  }
  static void fit(int to, int a, int b) {
    const TileShapes& shapes = state().shapes;
    used(to), used(a), used(b);
    check(to != a && to != b && a != b, "a product of a tile with itself");
    check(shapes.rows[to] == shapes.rows[a] && shapes.row_bytes[to] == shapes.row_bytes[b] && shapes.row_bytes[a] / 4 == shapes.rows[b],
          "shapes that do not fit");
  }
};

}  // namespace HFCA_TIER
