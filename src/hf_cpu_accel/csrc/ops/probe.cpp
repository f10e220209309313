// What was chosen at load, what this machine can do at most, and the memory that the ops keep.
#include <torch/csrc/stable/ops.h>

#include <chrono>
#include <string>
#include <vector>

#include "../abi.h"
#include "../buffers.h"
#include "../dispatch.h"
#include "../op.h"
#include "../team.h"
#include "../text.h"

namespace hfca {
namespace {

std::string tier() { return dispatch().tier; }
int64_t abi_version() { return current_abi; }
bool bf16_dot() { return dispatch().bf16_dot; }
std::string without_tiles() { return dispatch().without_tiles ? dispatch().without_tiles : ""; }
bool run_together(bool together) { return threads_run_together() = together; }
int64_t release_buffers() { return static_cast<int64_t>(trim_buffers()); }

template <class F>
double best_rate(int64_t threads, double amount_per_thread, F work) {
  double best = 0.0;
  for (int repeat = 0; repeat < 7; ++repeat) {
    const auto start = std::chrono::steady_clock::now();
    torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) work(t);
    });
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    const double rate = amount_per_thread * static_cast<double>(threads) / took.count();
    if (rate > best) best = rate;
  }
  return best;
}

// Billions of operations per second of the inner GEMM instruction over `threads` of torch's threads.
double measure_flops(const Text& dtype, int64_t threads) {
  const WeightKind kind = dtype == "int8" ? WeightKind::int8 : dtype == "bfloat16" ? WeightKind::bfloat16 : WeightKind::float32;
  STD_TORCH_CHECK(dtype == "int8" || dtype == "bfloat16" || dtype == "float32",
                  "hf_cpu_accel::measure_flops: dtype is float32, bfloat16 or int8");
  STD_TORCH_CHECK(threads >= 1, "hf_cpu_accel::measure_flops: threads must be at least 1");
  constexpr int64_t iterations = 2000000;
  const double operations = dispatch().kernels.multiply_adds(kind, iterations);
  return best_rate(threads, operations, [&](int64_t) { dispatch().kernels.multiply_adds(kind, iterations); }) * 1e-9;
}

// Billions of bytes per second read from `megabytes` of memory, shared out over `threads` of torch's threads.
double measure_read_bandwidth(int64_t threads, int64_t megabytes) {
  constexpr int64_t most = 1 << 20;
  STD_TORCH_CHECK(threads >= 1 && threads <= most && megabytes >= 1 && megabytes <= most,
                  "hf_cpu_accel::measure_read_bandwidth: threads and megabytes must be from 1 to ", most);
  const int64_t floats = megabytes * (1 << 20) / 4 / threads / 128 * 128;
  std::vector<float> memory(static_cast<size_t>(floats * threads), 1.0f);
  const auto read = [&](int64_t t) {
    volatile float sink = dispatch().kernels.read_stream(memory.data() + t * floats, floats);
    (void)sink;
  };
  return best_rate(threads, static_cast<double>(floats) * 4, read) * 1e-9;
}

}  // namespace
}  // namespace hfca

HFCA_OP_WITHOUT_TENSORS(tier, "() -> str")
HFCA_OP_WITHOUT_TENSORS(abi_version, "() -> int")
HFCA_OP_WITHOUT_TENSORS(built_tiers, "() -> str")
HFCA_OP_WITHOUT_TENSORS(bf16_dot, "() -> bool")
HFCA_OP_WITHOUT_TENSORS(without_tiles, "() -> str")
HFCA_OP_WITHOUT_TENSORS(run_together, "(bool together) -> bool")
HFCA_OP_WITHOUT_TENSORS(release_buffers, "() -> int")
HFCA_OP_WITHOUT_TENSORS(buffer_allocations, "() -> int")
HFCA_OP_WITHOUT_TENSORS(measure_flops, "(str dtype, int threads) -> float")
HFCA_OP_WITHOUT_TENSORS(measure_read_bandwidth, "(int threads, int megabytes) -> float")
