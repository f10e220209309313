// A mixture of experts: tokens through the FFNs of the experts that each of them was given to (Shazeer et al. 2017, arXiv:1701.06538).
//
//   up        expert by expert, its tokens gathered: activation and gate in the epilogue
//   down      expert by expert: a row for each token of each expert
//   combine   a token's rows by their weights
//
// Each product is one step of the team, whatever experts it takes: their panels are dealt out by what they cost. A thread packs the
// rows of the experts that it multiplies for itself, some at a time: no meeting between packing and product, little memory, and of the
// weights only those of experts with tokens are read.
#pragma once
#include <type_traits>

#include "../gemm/driver.h"
#include "router.h"

namespace hfca {

// Weights of the experts lie one after another, n being that of all together. An expert that all tokens go to may have another width.
struct Mixture {
  int64_t experts = 0, top_k = 0, intermediate = 0;
  Gemm up, down, shared_up, shared_down;  // the weight sides; n == 0: there is no shared expert

  bool has_shared() const { return shared_up.n > 0; }
};

// Memory of a mixture that all threads work on.
struct MixtureMemory {
  Assignment assignment;
  Matrix hidden, shared_hidden;    // [slots, intermediate], [tokens, that of the shared expert]
  Matrix outputs, shared_outputs;  // [slots, features], [tokens, features]

  // Carved from `memory`, of which it takes `bytes`; with null, only to know how many.
  MixtureMemory(const Mixture& m, int64_t tokens, char* memory) {
    const int64_t slots = tokens * m.top_k, features = m.down.n / m.experts;
    const auto take = [&](auto& to, int64_t count) {
      using T = std::remove_pointer_t<std::remove_reference_t<decltype(to)>>;
      if (memory) to = reinterpret_cast<T*>(memory + bytes);
      bytes += Workspace::size_of<T>(count);
    };
    const auto rows = [&](Matrix& to, int64_t count, int64_t columns) {
      float* data = nullptr;
      take(data, count * columns);
      to = {data, columns};
    };
    assignment.tokens = tokens, assignment.top_k = m.top_k, assignment.experts = m.experts;
    take(assignment.expert, slots), take(assignment.weight, slots), take(assignment.slot, slots), take(assignment.source, slots);
    take(assignment.begin, m.experts + 1);
    rows(hidden, slots, m.intermediate), rows(outputs, slots, features);
    if (m.has_shared()) rows(shared_hidden, tokens, m.shared_down.k), rows(shared_outputs, tokens, features);
  }
  int64_t bytes = 0;
};

// One of the two products of a mixture. input: rows by slot (with an index, gathered), shared_input: by token.
struct ExpertProduct {
  const Gemm *routed, *shared;
  Matrix input, output, shared_input, shared_output;
};

inline Matrix from_row(Matrix m, int64_t row) {
  if (m.index) m.index += row;
  else m.data = static_cast<char*>(m.data) + row * m.stride * static_cast<int64_t>(m.bf16 ? sizeof(uint16_t) : sizeof(float));
  return m;
}

// Rows of an expert that a thread packs and multiplies together. The expert after the last is the shared one.
struct ExpertBlock {
  int64_t expert, first, rows, panels, tiles;
  int64_t unit_cost;  // of a panel by a tile
};

constexpr int64_t most_block_rows = 256;

// f(block, what all blocks before it cost); the cost of all.
template <class F>
int64_t each_block(const ExpertProduct& p, const Assignment& a, const F& f) {
  constexpr int64_t fetch = 6;  // a panel's way from memory takes as long as its product with so many rows
  int64_t cost = 0;
  const auto cut = [&](const Gemm& side, int64_t n, int64_t expert, int64_t first, int64_t count) {
    const int64_t blocks = (count + most_block_rows - 1) / most_block_rows,
                  panels = (n + panel_columns - 1) / panel_columns / (side.gated ? 2 : 1);
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t begin = b * count / blocks, rows = (b + 1) * count / blocks - begin;
      const int64_t tile_rows = kernels_of(side.kind, rows).tile_rows, tiles = (rows + tile_rows - 1) / tile_rows;
      const ExpertBlock block{expert, first + begin, rows, panels, tiles, (rows + fetch) * side.k / tiles + 1};
      f(block, cost);
      cost += block.panels * tiles * block.unit_cost;
    }
  };
  for (int64_t e = 0; e < a.experts; ++e)
    if (a.begin[e + 1] > a.begin[e]) cut(*p.routed, p.routed->n / a.experts, e, a.begin[e], a.begin[e + 1] - a.begin[e]);
  if (p.shared->n > 0) cut(*p.shared, p.shared->n, a.experts, 0, a.tokens);
  return cost;
}

// The product of a block, complete but for the memory of its packed input.
inline Gemm gemm_of_block(const ExpertProduct& p, const Assignment& a, const ExpertBlock& block) {
  const bool shared = block.expert == a.experts;
  Gemm g = shared ? *p.shared : *p.routed;
  if (!shared) {
    g.n /= a.experts;
    const int64_t feature = block.expert * g.n;
    g.weight = static_cast<const char*>(g.weight) + feature / panel_columns * kernels_of(g.kind, block.rows).panel_bytes(g);
    if (g.weight_scale) g.weight_scale += feature, g.weight_sum += feature;
    if (g.bias.data)
      g.bias.data = static_cast<char*>(g.bias.data) + feature * static_cast<int64_t>(g.bias.bf16 ? sizeof(uint16_t) : sizeof(float));
  }
  g.m = block.rows;
  g.input = from_row(shared ? p.shared_input : p.input, block.first);
  g.outputs[0] = g.outputs[1] = from_row(shared ? p.shared_output : p.output, block.first);
  g.output_begin[1] = g.gated ? g.n / 2 : g.n;
  g.output_begin[2] = g.n;
  return g;
}

// Words of a packed row at most.
inline int64_t input_words(const Mixture& m) {
  int64_t words = 0;
  for (const Gemm* side : {&m.up, &m.down, &m.shared_up, &m.shared_down})
    if (side->n > 0) words = std::max(words, most_input_words(*side));
  return words;
}

inline void run_product(const Team& team, const ExpertProduct& p, const Assignment& a, const GemmMemory& mine) {
  const int64_t cost = each_block(p, a, [](const ExpertBlock&, int64_t) {});
  team.each(cost, [&](int64_t low, int64_t high) {
    each_block(p, a, [&](const ExpertBlock& block, int64_t before) {
      // Units whose cost begins within this thread's share.
      const int64_t units = block.panels * block.tiles;
      const auto units_before = [&](int64_t limit) {
        return limit <= before ? 0 : std::min(units, (limit - before + block.unit_cost - 1) / block.unit_cost);
      };
      const int64_t begin = units_before(low), end = units_before(high);
      if (begin >= end) return;
      Gemm g = gemm_of_block(p, a, block);
      g.words = mine.words, g.input_scale = mine.scale, g.input_zero = mine.zero;
      g.input_words = input_words(g);
      const GemmKernels kernels = kernels_of(g);
      const GemmGrid grid(g, kernels);
      for (int64_t t = 0; t < grid.tiles; ++t) kernels.pack_rows(g, grid.tile_row(t), grid.tile_height(t));
      run_units(kernels, g, grid, begin, end);
    });
  });
}

// `input` [tokens, features] through the experts of memory.assignment, whose `expert` and `weight` are there. sum = residual (none where
// its data is null) + what the experts make of it, the shared one's by its gate [tokens] at distance gate_stride (null: 1).
inline void run_mixture(const Team& team, const Mixture& m, const MixtureMemory& memory, const Matrix& input, const Matrix& residual,
                        const Matrix& sum, const float* gate, int64_t gate_stride, const GemmMemory& mine) {
  const Assignment& a = memory.assignment;
  Matrix gathered = input;
  gathered.index = a.source;
  run_product(team, {&m.up, &m.shared_up, gathered, memory.hidden, input, memory.shared_hidden}, a, mine);
  run_product(team, {&m.down, &m.shared_down, memory.hidden, memory.outputs, memory.shared_hidden, memory.shared_outputs}, a, mine);
  constexpr int64_t columns = 512;  // pieces of a token: decoding has fewer tokens than threads
  const int64_t features = m.down.n / m.experts, pieces = (features + columns - 1) / columns;
  const auto row_of = [](const Matrix& rows, int64_t row) { return static_cast<const float*>(rows.data) + row * rows.stride; };
  team.each(a.tokens * pieces, [&](int64_t begin, int64_t end) {
    const float* rows[max_top_k + 1];
    float weights[max_top_k + 1];
    for (int64_t i = begin; i < end; ++i) {
      const int64_t token = i / pieces, first = i % pieces * columns;
      for (int64_t j = 0; j < a.top_k; ++j) {
        rows[j] = row_of(memory.outputs, a.slot[token * a.top_k + j]);
        weights[j] = a.weight[token * a.top_k + j];
      }
      if (m.has_shared()) rows[a.top_k] = row_of(memory.shared_outputs, token), weights[a.top_k] = gate ? gate[token * gate_stride] : 1.0f;
      dispatch().kernels.combine(residual, rows, weights, a.top_k + m.has_shared(), sum, token, first, std::min(first + columns, features));
    }
  });
}

}  // namespace hfca
