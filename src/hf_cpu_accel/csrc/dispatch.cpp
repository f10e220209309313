#include "dispatch.h"

#include <chrono>
#include <cstdlib>
#include <cstring>
#if defined(HFCA_X86)
#include <cpuid.h>

#include "amx_permission.h"
#include "tile_check.h"
#include "tile_tier.h"
#elif defined(HFCA_ARM)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace hfca {
namespace {

// From the lowest to the highest. A CPU need not run all tiers below its best: server cores with AVX-512 before Sapphire Rapids lack
// the 256-bit VNNI of avx2_vnni.
struct Tier {
  const char* name;
  bool (*runs)();
  const Kernels& (*kernels)();
  void (*use_tiles)(Kernels&) = nullptr;  // puts GEMMs of tiles over them
  const char* below = nullptr;            // the tier whose kernels those are
  bool only_named = false;
};

#if defined(HFCA_X86)
// __builtin_cpu_supports also checks that the operating system saves the registers (xgetbv).
// Not every compiler's knows F16C: leaf 1, bit 29 of ecx.
bool runs_avx2() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx >> 29 & 1);
  return f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
bool runs_avx512() {
  return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}
bool runs_avx512_vnni() { return runs_avx512() && __builtin_cpu_supports("avx512vnni"); }
bool runs_avx512_bf16() { return runs_avx512_vnni() && __builtin_cpu_supports("avx512bf16"); }
bool runs_amx() { return runs_avx512_bf16() && !no_tiles_because(); }
// Nor AVX-VNNI: leaf 7, subleaf 1, bit 4 of eax.
bool runs_avx2_vnni() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return runs_avx2() && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax >> 4 & 1);
}
#elif defined(HFCA_ARM)
bool runs_neon_dotprod() { return getauxval(AT_HWCAP) & HWCAP_ASIMDDP; }
bool runs_neon_i8mm_bf16() {
  constexpr unsigned long both = HWCAP2_I8MM | HWCAP2_BF16;
  return runs_neon_dotprod() && (getauxval(AT_HWCAP2) & both) == both;
}
#endif

constexpr Tier tiers[] = {
    {"generic", [] { return true; }, &kernels_generic},
#if defined(HFCA_X86)
    {"avx2", &runs_avx2, &kernels_avx2},
    {"avx2_vnni", &runs_avx2_vnni, &kernels_avx2_vnni},
    {"avx512", &runs_avx512, &kernels_avx512},
    {"avx512_vnni", &runs_avx512_vnni, &kernels_avx512_vnni},
    {"avx512_bf16", &runs_avx512_bf16, &kernels_avx512_bf16},
    {"amx", &runs_amx, &kernels_avx512_bf16, &use_tiles_amx, "avx512_bf16"},
    {"amx_emulated", &runs_avx512_vnni, &kernels_avx512_vnni, &use_tiles_amx_emulated, "avx512_vnni", true},
#elif defined(HFCA_ARM)
    {"neon_dotprod", &runs_neon_dotprod, &kernels_neon_dotprod},
    {"neon_i8mm_bf16", &runs_neon_i8mm_bf16, &kernels_neon_i8mm_bf16},
#endif
};

bool built(const Tier& tier) { return tier.kernels && (!tier.below || tier.use_tiles); }

const Tier& chosen_tier() {
#if defined(HFCA_X86)
  __builtin_cpu_init();
#endif
  const char* cap = std::getenv("HF_CPU_ACCEL_ISA");
  const Tier* best = tiers;
  for (const Tier& tier : tiers) {
    const bool named = cap && std::strcmp(cap, tier.name) == 0;
    if ((named || !tier.only_named) && built(tier) && tier.runs()) best = &tier;
    if (named) break;
  }
  return *best;
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

#if defined(HFCA_X86)
// vdpbf16ps runs at twice the rate of float32 FMA on Zen 4 but at half of it on Intel cores whose bfloat16 lives in AMX: there bfloat16
// weights widened to float32 are faster, so measure (about 1 ms) instead of trusting the flag.
// HF_CPU_ACCEL_BF16_DOT=0|1 decides instead, for results that are the same on every machine of a fleet. A build without avx512_vnni has
// no other kernels to choose.
void choose_bfloat16(Dispatch& d) {
  d.bf16_dot = true;
  if (!&kernels_avx512_vnni) return;
  const char* wish = std::getenv("HF_CPU_ACCEL_BF16_DOT");
  d.bf16_dot =
      wish && (*wish == '0' || *wish == '1') ? *wish == '1' : rate(d.kernels, WeightKind::bfloat16) > rate(d.kernels, WeightKind::float32);
  if (!d.bf16_dot) {
    constexpr int bfloat16 = static_cast<int>(WeightKind::bfloat16);
    d.kernels.gemm[bfloat16] = kernels_avx512_vnni().gemm[bfloat16];
    d.kernels.attention = kernels_avx512_vnni().attention;
  }
}

// Tiles are complicated machinery that few have and that hypervisors emulate: they serve where they compute what the tier below does.
void choose_tiles(Dispatch& d, const Tier& tier) {
  Kernels kernels = d.kernels;
  tier.use_tiles(kernels);
  if (tiles_agree(kernels, d.kernels)) {
    d.kernels = kernels, d.bf16_dot = true;
  } else {
    d.tier = tier.below, d.without_tiles = "a product of tiles is not what it should be";
  }
}
#endif

Dispatch choose() {
  const Tier& tier = chosen_tier();
  Dispatch d{tier.name, false, tier.kernels(), nullptr};
#if defined(HFCA_X86)
  if (tier.kernels == &kernels_avx512_bf16) choose_bfloat16(d);
  if (tier.use_tiles) choose_tiles(d, tier);
  const char* cap = std::getenv("HF_CPU_ACCEL_ISA");
  if (!tier.use_tiles && (!cap || !*cap || std::strcmp(cap, "amx") == 0)) d.without_tiles = no_tiles_because();
#elif defined(HFCA_ARM)
  d.bf16_dot = tier.kernels == &kernels_neon_i8mm_bf16;
#endif
  return d;
}

}  // namespace

const Dispatch& dispatch() {
  static const Dispatch chosen = choose();
  return chosen;
}

std::string built_tiers() {
  std::string names;
  for (const Tier& tier : tiers)
    if (built(tier)) names += (names.empty() ? "" : " ") + std::string(tier.name);
  return names;
}

}  // namespace hfca
