// What simd/tiles.h gives for random tiles of all kinds of shapes, a line each: built once for a machine that has AMX and nothing else
// (boot.S has started it), and once with emulated tiles for this one. The lines must be the same.
#include <initializer_list>

#define HFCA_TIER tested
#include "simd/tiles.h"

#ifdef HFCA_BARE
namespace {
void put(char c) { asm volatile("outb %0, %1" : : "a"(c), "Nd"(static_cast<uint16_t>(0xe9))); }
}  // namespace

// What the compiler calls for copies and zeros.
extern "C" void* memcpy(void* to, const void* from, unsigned long bytes) {
  for (unsigned long i = 0; i < bytes; ++i) static_cast<volatile char*>(to)[i] = static_cast<const char*>(from)[i];
  return to;
}
extern "C" void* memset(void* to, int value, unsigned long bytes) {
  for (unsigned long i = 0; i < bytes; ++i) static_cast<volatile char*>(to)[i] = static_cast<char>(value);
  return to;
}
#else
namespace {
void put(char c) { std::putchar(c); }
}  // namespace
#endif

namespace {

using HFCA_TIER::Tiles;
using HFCA_TIER::TileShapes;

constexpr int words = 16, stride = 128;

struct alignas(64) Memory {
  uint32_t a[16][words], b[16][stride / 4], sums[16][stride / 4];
};
Memory memory;
uint64_t state = 88172645463325252;

// Marsaglia's xorshift64.
uint32_t random() {
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return static_cast<uint32_t>(state >> 32);
}

// Numbers of -2^k to 2^k, one in eight so small that some of their products, or they themselves, are denormal. No NaN, no infinity.
uint32_t random_bf16() {
  const uint32_t bits = random(), exponent = bits % 8 == 0 ? bits % 3 : 117 + bits % 20;
  return (bits >> 16 & 0x807F) | exponent << 7;
}

void text(const char* s) {
  while (*s) put(*s++);
}

void hex(uint64_t value) {
  for (int shift = 60; shift >= 0; shift -= 4) put("0123456789abcdef"[value >> shift & 15]);
}

// Fowler, Noll and Vo's hash, FNV-1a.
uint64_t hash(const void* p, unsigned long bytes) {
  uint64_t value = 14695981039346656037u;
  for (unsigned long i = 0; i < bytes; ++i) value = (value ^ static_cast<const uint8_t*>(p)[i]) * 1099511628211u;
  return value;
}

void line(const char* name, uint64_t value) { text(name), put(' '), hex(value), put('\n'); }

// What is not tried is Tiles::save, since Bochs 3.1 refuses STTILECFG. Two products that share tile 0, [rows, k] by [k, columns] of four bytes, added to what is in memory and to zero.
template <bool bf16>
void product(int rows, int k, int columns) {
  for (auto& row : memory.a)
    for (uint32_t& word : row) word = bf16 ? random_bf16() | random_bf16() << 16 : random();
  // Weights without a sign: Bochs 3.1 takes all bytes to have none.
  for (auto& row : memory.b)
    for (uint32_t& word : row) word = bf16 ? random_bf16() | random_bf16() << 16 : random() & 0x7F7F7F7F;
  for (auto& row : memory.sums)
    for (uint32_t& word : row) word = bf16 ? random_bf16() << 16 : random();
  TileShapes shapes;
  shapes.set(0, rows, 4 * k);
  for (const int b : {2, 3}) shapes.set(b, k, 4 * columns);
  for (const int sum : {4, 5}) shapes.set(sum, rows, 4 * columns);
  Tiles::configure(shapes);
  Tiles::zero<4>();
  Tiles::load<5>(memory.sums[0] + words, stride);
  for (int step = 0; step < 2; ++step) {
    Tiles::load<0>(memory.a, 64);
    Tiles::load_once<2>(memory.b, stride);
    Tiles::load<3>(memory.b[0] + words, stride);
    if constexpr (bf16) {
      Tiles::add_bf16<4, 0, 2>(), Tiles::add_bf16<5, 0, 3>();
    } else {
      Tiles::add_bytes<4, 0, 2>(), Tiles::add_bytes<5, 0, 3>();
    }
  }
  Tiles::store<4>(memory.sums, stride);
  Tiles::store<5>(memory.sums[0] + words, stride);
  Tiles::release();
  text(bf16 ? "bf16" : "bytes");
  for (const int size : {rows, k, columns}) put(' '), put("0123456789abcdefg"[size]);
  line("", hash(memory.sums, sizeof(memory.sums)));
}

void products() {
  for (const int rows : {1, 5, 16})
    for (const int k : {1, 7, 16})
      for (const int columns : {3, 16}) product<false>(rows, k, columns), product<true>(rows, k, columns);
  text("end\n");
}

}  // namespace

#ifdef HFCA_BARE
extern "C" [[gnu::section(".text.start")]] void start() {
  products();
  for (const char* word = "Shutdown"; *word; ++word)  // what the BIOS of Bochs takes for switching off
    asm volatile("outb %0, %1" : : "a"(*word), "d"(static_cast<uint16_t>(0x8900)));
  for (;;) asm volatile("hlt");
}
#else
int main() { products(); }
#endif
