// GEMMs by AMX tiles. Packed input and weights feed them as they are: 16 words of 16 rows of a packed tile of input are one tile, and 16
// words of a weight panel are two, side by side.
//
// Up to 16 rows are one tile of input by both of a panel; above, two by two: four tile loads for four products, which together take twice
// as long as the loads. Of up to 32 rows and all of k the sums stay in tiles; then they go to memory, and while the next 32 rows are
// multiplied, bit by bit through the epilogue: the products occupy another unit of the core than the epilogue does, and hardly any of
// those that issue instructions.
//
// Integers are those of the tier below. bfloat16 tiles add even and odd products apart, so that the results of bfloat16 rows differ in
// their last bits between GEMMs of up to sixteen rows (tile_tier.cpp), which vdpbf16ps multiplies, and of more.
#pragma once
#include <cstring>

#include "../simd/tiles.h"
#include "int4.h"
#include "int8_weight.h"
#include "microkernel.h"

namespace HFCA_TIER {

constexpr int tiles_rows = 2 * most_tile_rows;  // of packed input that are multiplied together

// What a product leaves in memory, and what is done with rows of it before the epilogue. lines: packed rows of one row of input.
struct TileBf16 {
  using Words = Bf16Words;
  static constexpr bool quantized = false;
  static constexpr int lines = 1;
  template <int to, int a, int b>
  static void add() {
    Tiles::add_bf16<to, a, b>();
  }
  static Simd::Float sum(const uint32_t* p) { return Simd::load(reinterpret_cast<const float*>(p)); }
};

struct TileInt8 {
  using Words = DotInt8::Words;
  static constexpr bool quantized = true;
  static constexpr int lines = 1;
  template <int to, int a, int b>
  static void add() {
    Tiles::add_bytes<to, a, b>();
  }
  static Simd::Float sum(const uint32_t* p) { return Simd::to_float(Simd::load_int(reinterpret_cast<const int32_t*>(p))); }
};

struct TileInt8Weight : TileInt8 {
  using Words = PairedRows;
  static constexpr int lines = 2;
  static Simd::Float sum(const uint32_t* p) {
    return Simd::fma(TileInt8::sum(p), Simd::set1(PairedRows::radix), TileInt8::sum(p + hfca::panel_columns));
  }
};

// Sums that wait for their epilogue, which run_some does for some rows at a time.
struct Unfinished {
  void (*finish)(const Gemm&, float* sums, int64_t row, int rows, int64_t column, int columns) = nullptr;
  const Gemm* g = nullptr;
  uint32_t* sums = nullptr;
  int64_t row = 0, column = 0;
  int left = 0, columns = 0, lines = 1;

  HFCA_INLINE void run_some(int rows) {
    const int count = rows < left ? rows : left;
    finish(*g, reinterpret_cast<float*>(sums), row, count, column, columns);
    sums += count * lines * hfca::panel_columns, row += count, left -= count;
  }
};

// What a thread has between enter and leave.
struct TileWork {
  alignas(64) uint32_t sums[2][tiles_rows * hfca::panel_columns];
  alignas(64) uint32_t tail[most_tile_rows * hfca::panel_columns];  // the last words of a panel, zeros behind them
  TileShapes before, now;
  Unfinished unfinished;
  int turn = 0;

  static TileWork& mine() {
    static thread_local TileWork work;
    return work;
  }

  // torch's own kernels keep tiles configured between their calls, thread by thread, and do not look whether they still are.
  static void enter() {
    TileWork& work = mine();
    Tiles::save(work.before);
    work.now = TileShapes{};
  }
  static void leave() {
    TileWork& work = mine();
    if (work.unfinished.left > 0) work.unfinished.run_some(work.unfinished.left);
    if (work.before.palette == 0) Tiles::release();
    else Tiles::configure(work.before);
  }

  // Tiles 0 to 3 are sums, 4 and 5 input, 6 and 7 weights.
  void shape_for(int lines) {
    const int first = lines < most_tile_rows ? lines : most_tile_rows, second = lines - first;
    if (now.rows[4] == first && now.rows[5] == second) return;
    now = TileShapes{};
    now.set(0, first), now.set(1, first), now.set(4, first);
    if (second > 0) now.set(2, second), now.set(3, second), now.set(5, second);
    now.set(6, most_tile_rows), now.set(7, most_tile_rows);
    Tiles::configure(now);
  }
};

template <class Kind>
struct TileGemm {
  using Words = typename Kind::Words;
  static constexpr int tile_rows = tiles_rows / Kind::lines, row_unit = most_tile_rows / Kind::lines;
  static constexpr int64_t step_bytes = 2 * tile_bytes;  // of a panel, for 16 words of k
  // Of a panel that stay in the nearest cache (48 KB in all CPUs with tiles) while input and sums pass by.
  static constexpr int64_t near_bytes = 24576;

  static int64_t input_words(const Gemm& g) { return Kind::lines * padded_words(Words::count(g.k)); }
  static int64_t weight_words(const Gemm& g) { return Words::count(g.k); }
  static int64_t panel_bytes(const Gemm& g) { return weight_words(g) * hfca::panel_columns * 4; }

  static void compute(const Gemm& g, int64_t row, int rows, int64_t panel, const void* weight, hfca::Ahead ahead, hfca::Part part) {
    TileWork& work = TileWork::mine();
    const int lines = rows * Kind::lines;
    const int64_t all = weight_words(g), begin = part.begin / Kind::lines, till = part.end / Kind::lines;
    const bool complete = part.last || till >= all;
    const auto* input = reinterpret_cast<const char*>(g.words + row * g.input_words + part.begin * rows);
    work.shape_for(lines);
    uint32_t* const kept = reinterpret_cast<uint32_t*>(part.sums);
    const Product product{
        input, lines, weight, (complete ? all : till) - begin, begin > 0 ? kept : nullptr, part.last ? work.sums[work.turn] : kept};
    const bool along = ahead.step == hfca::panel_columns * 4;
    if (lines <= most_tile_rows) along ? multiply<1, true>(work, product, ahead) : multiply<1, false>(work, product, ahead);
    else along ? multiply<2, true>(work, product, ahead) : multiply<2, false>(work, product, ahead);
    if (part.last) postpone(work, g, product.sums, row, rows, panel);
    else if (complete) become_floats(part.sums, rows);
  }

  static constexpr hfca::GemmKernels kernels() {
    hfca::GemmKernels k = common(&Words::pack);
    if constexpr (Kind::lines == 1) {
      k.pack_winograd = &pack_winograd<Words, Kind::quantized>;
      k.run_elements = Words::run_elements;
    }
    return k;
  }
  static constexpr hfca::GemmKernels kernels_of_words() {
    hfca::GemmKernels k = common(&pack_image_rows);
    k.run_elements = packed_words * 4;
    return k;
  }
  static constexpr hfca::GemmKernels kernels_of_int4() {
    hfca::GemmKernels k = common(&Words::pack);
    k.input_words = &Int4Gemm::input_words, k.panel_bytes = &Int4Gemm::panel_bytes;
    k.unpack = &Int4Gemm::unpack;
    return k;
  }

  // sums[lines][panel_columns] = before + input @ `words` of a panel. before: null for zeros.
  struct Product {
    const char* input;
    int lines;
    const void* weight;
    int64_t words;
    const uint32_t* before;
    uint32_t* sums;
  };

  // inputs: tiles of input side by side. along: these are all rows there are, so that the weights pass by once and the input stays;
  // otherwise it is the other way around.
  template <int inputs, bool along>
  static void multiply(TileWork& work, const Product& product, hfca::Ahead ahead) {
    const auto* weight = static_cast<const char*>(product.weight);
    const char* input = product.input;
    const int64_t steps = product.words / packed_words, tail = product.words % packed_words;
    if (tail > 0) {
      std::memcpy(work.tail, weight + steps * step_bytes, static_cast<size_t>(tail) * hfca::panel_columns * 4);
      std::memset(work.tail + tail * hfca::panel_columns, 0, static_cast<size_t>(packed_words - tail) * hfca::panel_columns * 4);
    }
    const int rows = rows_for_step(work.unfinished, steps);
    constexpr int64_t sums_apart = hfca::panel_columns * 4;
    if (product.before) each_sum<inputs>([&](auto i, int64_t at) HFCA_INLINE { Tiles::load<i>(product.before + at, sums_apart); });
    else each_sum<inputs>([](auto i, int64_t) HFCA_INLINE { Tiles::zero<i>(); });
    const auto step = [&](const void* w) HFCA_INLINE {
      const auto load_input = [&](auto i) HFCA_INLINE {
        const char* const from = input + i * tile_bytes;
        if constexpr (along) Tiles::load<4 + i>(from, tile_row_bytes);
        else Tiles::load_once<4 + i>(from, tile_row_bytes);
      };
      load_input(Index<0>{});
      Tiles::load<6>(w, 2 * tile_row_bytes);
      Kind::template add<0, 4, 6>();
      Tiles::load<7>(static_cast<const char*>(w) + tile_row_bytes, 2 * tile_row_bytes);
      Kind::template add<1, 4, 7>();
      if constexpr (inputs == 2) {
        load_input(Index<1>{});
        Kind::template add<2, 5, 6>();
        Kind::template add<3, 5, 7>();
      }
      input += product.lines * tile_row_bytes;
    };
    for (int64_t s = 0; s < steps; ++s, weight += step_bytes) {
      step(weight);
      ask<along>(ahead);
      if (work.unfinished.left > 0) work.unfinished.run_some(rows);
    }
    if (tail > 0) step(work.tail);
    if (work.unfinished.left > 0) work.unfinished.run_some(work.unfinished.left);
    each_sum<inputs>([&](auto i, int64_t at) HFCA_INLINE { Tiles::store<i>(product.sums + at, sums_apart); });
  }

 protected:
  static constexpr hfca::GemmKernels common(void (*pack)(const Gemm&, int64_t, int)) {
    hfca::GemmKernels k{tile_rows, 4 * hfca::panel_columns / Kind::lines, &input_words, &panel_bytes, pack, &compute};
    k.near_words = near_bytes / k.word_bytes, k.row_lines = Kind::lines;
    k.row_unit = row_unit, k.enter = &TileWork::enter, k.leave = &TileWork::leave;
    return k;
  }

  // f(tile of sums, where its first number is): those of the first `inputs` tiles of input, the first of which has `first` rows.
  template <int inputs, class F>
  HFCA_INLINE static void each_sum(const F& f, int first = most_tile_rows) {
    unroll<0, 2 * inputs>([&](auto i) HFCA_INLINE { f(i, i / 2 * first * hfca::panel_columns + i % 2 * (hfca::panel_columns / 2)); });
  }

  // Rows of what is unfinished that each step takes to be done at the end. A few at a time: each piece loads scales and biases.
  static int rows_for_step(const Unfinished& unfinished, int64_t steps) {
    constexpr int least = 8;
    const int64_t rows = steps > 0 ? (unfinished.left + steps - 1) / steps : unfinished.left;
    return rows > least ? static_cast<int>(rows) : least;
  }

  // See far_bytes.
  template <bool along>
  HFCA_INLINE static void ask(hfca::Ahead& ahead) {
    if (ahead.step == 0) return;
    const char* const stop = ahead.weight + packed_words * ahead.step;
    for (; ahead.weight < stop; ahead.weight += 64) {
      __builtin_prefetch(ahead.weight, 0, 2);
      if constexpr (along) __builtin_prefetch(ahead.weight + hfca::near_bytes - hfca::far_bytes, 0, 3);
    }
  }

  static int columns_of(const Gemm& g, int64_t panel) {
    const int64_t left = g.n - panel * hfca::panel_columns;
    return left < hfca::panel_columns ? static_cast<int>(left) : hfca::panel_columns;
  }

  // The sums of all of k: their epilogue comes while the next ones are multiplied.
  static void postpone(TileWork& work, const Gemm& g, uint32_t* sums, int64_t row, int rows, int64_t panel) {
    work.unfinished = {&finish_rows, &g, sums, row, panel * hfca::panel_columns, rows, columns_of(g, panel), Kind::lines};
    work.turn ^= 1;
  }
  static void finish_rows(const Gemm& g, float* sums, int64_t row, int rows, int64_t column, int columns) {
    become_floats(sums, rows);
    finish<Kind::quantized>(g, sums, row, rows, column, columns);
  }
  static void become_floats(float* sums, int rows) {
    if constexpr (!Kind::quantized) return;
    for (int i = 0; i < rows; ++i)
      for (int c = 0; c < hfca::panel_columns; c += Simd::width)
        Simd::store(sums + i * hfca::panel_columns + c,
                    Kind::sum(reinterpret_cast<const uint32_t*>(sums) + i * Kind::lines * hfca::panel_columns + c));
  }
};

}  // namespace HFCA_TIER
