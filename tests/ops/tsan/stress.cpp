// What threads share in the kernels, for ThreadSanitizer: the barrier and the counters of a team, the pool of buffers, and the ops that are
// built on them. Several client threads at once, each with a team of its own, as several requests of a service are.
//
// The arithmetic is that of the generic tier; how work is dealt out and where threads meet is the same on all. `make tsan` builds and
// runs it.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <numeric>
#include <random>
#include <vector>

#include "attention/driver.h"
#include "gemm/gemm_op.h"
#include "sparse/coo_to_csr.h"
#include "sparse/units.h"

namespace {

using namespace hfca;
using Random = std::mt19937;

void expect(bool right, const char* what) {
  if (right) return;
  std::fprintf(stderr, "wrong: %s\n", what);
  std::abort();
}

int64_t draw(Random& random, int64_t least, int64_t most) { return std::uniform_int_distribution<int64_t>(least, most)(random); }

std::vector<float> draw_floats(Random& random, int64_t count) {
  std::vector<float> values(static_cast<size_t>(count));
  std::normal_distribution<float> normal;
  for (float& value : values) value = normal(random);
  return values;
}

// Steps that read what other threads have written in the step before.
void chain_steps(Random& random) {
  const int64_t count = draw(random, 1, 200), steps = draw(random, 1, 12);
  std::vector<int64_t> now(static_cast<size_t>(count), 1), next(now);
  run_team(draw(random, 1, 6), [&](Team& team) {
    std::vector<int64_t>*from = &now, *to = &next;
    for (int64_t step = 0; step < steps; ++step) {
      const auto add = [&](int64_t i) {
        (*to)[static_cast<size_t>(i)] = (*from)[static_cast<size_t>(i)] + (*from)[static_cast<size_t>(count - 1 - i)];
      };
      if (step % 2) team.claim(count, add);
      else
        team.each(count, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) add(i);
        });
      std::swap(from, to);
    }
  });
  for (int64_t value : steps % 2 ? next : now) expect(value == int64_t{1} << steps, "steps of a team");
}

void sort_edges(Random& random) {
  const int64_t rows = draw(random, 1, 3000), cols = draw(random, 1, 50), edges = draw(random, 0, 40000);
  std::vector<int64_t> row, col;
  for (int64_t e = 0; e < edges; ++e) row.push_back(draw(random, 0, rows - 1)), col.push_back(draw(random, 0, cols - 1));
  std::vector<int32_t> rowptr(static_cast<size_t>(rows + 1)), sources(static_cast<size_t>(edges)), order(static_cast<size_t>(edges));
  EdgeSort sort(edges, rows, 4);
  Workspace workspace(sort.workspace_size());
  sort.take(workspace);
  std::atomic<bool> valid{true};
  const auto each = [&](int64_t begin, int64_t end, const auto& f) {
    for (int64_t e = begin; e < end; ++e) f(e, row[static_cast<size_t>(e)], col[static_cast<size_t>(e)]);
  };
  run_team(sort.threads(), [&](Team& team) {
    sort.run(team, cols, 0, each, [](int64_t, int64_t) { return false; }, valid, {rowptr.data(), sources.data(), order.data(), edges});
  });
  std::vector<int32_t> expected(static_cast<size_t>(edges));
  std::iota(expected.begin(), expected.end(), 0);
  std::stable_sort(expected.begin(), expected.end(),
                   [&](int32_t a, int32_t b) { return row[static_cast<size_t>(a)] < row[static_cast<size_t>(b)]; });
  expect(valid && order == expected && rowptr.back() == edges, "a sort of edges");
}

// Sums over a graph of which one row has so many edges that threads share it.
void sum_rows(Random& random) {
  const int64_t features = draw(random, 1, 40), sources = 300;
  std::vector<int32_t> rowptr{0};
  for (int64_t row = 0, hub = draw(random, 0, 19); row < 20; ++row)
    rowptr.push_back(rowptr.back() + static_cast<int32_t>(row == hub ? 3 * hub_edges : draw(random, 0, 4000)));
  std::vector<int32_t> col;
  for (int32_t e = 0; e < rowptr.back(); ++e) col.push_back(static_cast<int32_t>(draw(random, 0, sources - 1)));
  std::vector<float> x(static_cast<size_t>(sources * features), 1.0f), output(20 * static_cast<size_t>(features));
  Spmm s;
  s.graph = {rowptr.data(), col.data(), 20, static_cast<int64_t>(col.size()), sources};
  s.features = features, s.x = {x.data(), features}, s.output = {output.data(), features};
  expect(run_spmm(s), "a graph");
  for (int64_t i = 0; i < 20 * features; ++i)
    expect(output[static_cast<size_t>(i)] ==
               static_cast<float>(rowptr[static_cast<size_t>(i / features) + 1] - rowptr[static_cast<size_t>(i / features)]),
           "sums over a graph");
}

// Few rows, which all pack alone; some, which the team packs together; many, in blocks.
void multiply(Random& random) {
  const int64_t m = draw(random, 0, 2) ? draw(random, 1, 40) : 1500, n = draw(random, 1, 100), k = draw(random, 1, 90);
  const int64_t panels = (n + panel_columns - 1) / panel_columns;
  std::vector<float> x = draw_floats(random, m * k), output(static_cast<size_t>(m * n)),
                     weight(static_cast<size_t>(panels * k * panel_columns));
  for (int64_t column = 0; column < n; ++column)
    for (int64_t i = 0; i < k; ++i)
      weight[static_cast<size_t>((column / panel_columns * k + i) * panel_columns + column % panel_columns)] = 1.0f;
  Gemm g;
  g.m = m, g.n = n, g.k = k, g.weight = weight.data(), g.input = {x.data(), k};
  g.write_to({output.data(), n});
  run_gemm_op(g);
  for (int64_t row = 0; row < m; ++row) {
    const double sum = std::accumulate(x.begin() + row * k, x.begin() + (row + 1) * k, 0.0);
    for (int64_t column = 0; column < n; ++column)
      expect(std::abs(output[static_cast<size_t>(row * n + column)] - sum) < 1e-3, "a product");
  }
}

// Values of 1 weigh 1 together, whatever the scores are. Few queries cut their keys into parts, which are put together again.
void attend(Random& random) {
  const int64_t heads = 2, features = 24, queries = draw(random, 0, 1) ? 1 : draw(random, 1, 200), keys = queries + draw(random, 0, 1500);
  std::vector<float> query = draw_floats(random, heads * queries * features), key = draw_floats(random, heads * keys * features);
  std::vector<float> value(key.size(), 1.0f), output(query.size());
  const auto heads_of = [&](std::vector<float>& x, int64_t positions) { return Heads{x.data(), 0, positions * features, features}; };
  Attention a;
  a.q_len = queries, a.kv_len = keys, a.head_dim = a.value_dim = features, a.causal = true;
  a.query = heads_of(query, queries), a.key = heads_of(key, keys), a.value = heads_of(value, keys), a.output = heads_of(output, queries);
  std::vector<AttentionSequence> sequences{{a, 0, 0, keys}};
  run_attention(sequences, heads);
  for (float x : output) expect(std::abs(x - 1.0f) < 1e-4f, "attention");
}

// Blocks that one thread takes and another one gives back, while a third trims the pool. Each is filled by its owner.
void pass_buffers(Random& random) {
  static std::mutex mutex;
  static std::deque<std::pair<unsigned char*, size_t>> passed;
  for (int turn = 0; turn < 50; ++turn) {
    const size_t bytes = static_cast<size_t>(draw(random, 1, draw(random, 0, 9) ? 5000 : 3000000));
    auto* block = static_cast<unsigned char*>(take_buffer(bytes));
    std::memset(block, static_cast<int>(bytes % 251), bytes);
    std::pair<unsigned char*, size_t> other{block, bytes};
    {
      const std::lock_guard<std::mutex> lock(mutex);
      passed.push_back(other);
      other = passed.front();
      if (passed.size() > 8) passed.pop_front();
      else other.first = nullptr;
    }
    if (!other.first) continue;
    for (size_t i = 0; i < other.second; ++i) expect(other.first[i] == other.second % 251, "what is in a buffer");
    return_buffer(other.first);
    if (draw(random, 0, 20) == 0) trim_buffers();
    expect(buffer_allocations() > 0, "the count of allocations");
  }
}

void run_client(unsigned seed, int turns) {
  void (*const works[])(Random&) = {chain_steps, sort_edges, sum_rows, multiply, attend, pass_buffers};
  Random random(seed);
  for (int turn = 0; turn < turns; ++turn) {
    torch::stable::threads_given() = draw(random, 1, 4);
    works[draw(random, 0, 5)](random);
  }
}

}  // namespace

int main(int count, char** arguments) {
  const int turns = count > 1 ? std::atoi(arguments[1]) : 300;
  hfca::threads_run_together() = true;
  std::vector<std::thread> clients;
  for (unsigned seed = 0; seed < 4; ++seed) clients.emplace_back(run_client, seed, turns);
  for (std::thread& client : clients) client.join();
  std::printf("4 clients of %d calls: no races, no wrong results\n", turns);
}
