#include "dispatch.h"

#include <chrono>
#include <cstdlib>
#include <cstring>

namespace hfca {
namespace {

const char* const tiers[] = {"generic", "avx2", "avx512", "avx512_vnni", "avx512_bf16"};
constexpr int tier_count = 5;

// __builtin_cpu_supports also checks that the operating system saves the registers (xgetbv).
int best_tier() {
#if defined(HFCA_X86)
  __builtin_cpu_init();
  if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))) return 0;
  if (!(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")))
    return 1;
  if (!__builtin_cpu_supports("avx512vnni")) return 2;
  return __builtin_cpu_supports("avx512bf16") ? 4 : 3;
#else
  return 0;
#endif
}

int chosen_tier() {
  const int best = best_tier();
  const char* cap = std::getenv("HF_CPU_ACCEL_ISA");
  for (int i = 0; cap && i < best; ++i)
    if (std::strcmp(cap, tiers[i]) == 0) return i;
  return best;
}

const Kernels& table(int tier) {
#if defined(HFCA_X86)
  switch (tier) {
    case 1: return kernels_avx2();
    case 2: return kernels_avx512();
    case 3: return kernels_avx512_vnni();
    case 4: return kernels_avx512_bf16();
  }
#endif
  (void)tier;
  return kernels_generic();
}

#if defined(HFCA_X86)
double rate(const Kernels& kernels, WeightKind kind) {
  double best = 0.0;
  for (int i = 0; i < 5; ++i) {
    const auto start = std::chrono::steady_clock::now();
    const double done = kernels.multiply_adds(kind, 4000);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    if (done / took.count() > best) best = done / took.count();
  }
  return best;
}
#endif

Dispatch choose() {
  const int tier = chosen_tier();
  const Kernels& kernels = table(tier);
  Dispatch d{tiers[tier], false,          {kernels.gemm_float32, kernels.gemm_bfloat16, kernels.gemm_int8},
             kernels.attention, kernels.norm, kernels.multiply_adds, kernels.read_stream};
#if defined(HFCA_X86)
  if (tier == 4) {
    // vdpbf16ps runs at twice the rate of float32 FMA on Zen 4 but at half of it on Intel cores whose bfloat16 lives in AMX:
    // there bfloat16 weights widened to float32 are faster, so measure (about 1 ms) instead of trusting the flag.
    // HF_CPU_ACCEL_BF16_DOT=0|1 decides instead, for results that are the same on every machine of a fleet.
    const char* wish = std::getenv("HF_CPU_ACCEL_BF16_DOT");
    d.bf16_dot = wish && (*wish == '0' || *wish == '1') ? *wish == '1' : rate(kernels, WeightKind::bfloat16) > rate(kernels, WeightKind::float32);
    if (!d.bf16_dot) d.gemm[static_cast<int>(WeightKind::bfloat16)] = kernels_avx512_vnni().gemm_bfloat16;
  }
#endif
  return d;
}

}  // namespace

const Dispatch& dispatch() {
  static const Dispatch chosen = choose();
  return chosen;
}

}  // namespace hfca
