// The choice of kernels, made once at load.
#pragma once
#include <string>

#include "kernels.h"

namespace hfca {

struct Dispatch {
  const char* tier;  // "generic", "avx2", "avx2_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx", "amx_emulated"
  bool bf16_dot;     // bfloat16 GEMMs use the CPU's products of bfloat16
  Kernels kernels;   // of that tier; without bf16_dot, those for bfloat16 are of the tier below
  const char* without_tiles;  // why a tier of tiles was asked for or wished, and is not this one; null: it is, or is not allowed
};

// The best tier of this build that the CPU runs and that the environment variable HF_CPU_ACCEL_ISA, if it names a tier, is not below
// (unknown names do not cap). "amx_emulated" serves only where it is named.
const Dispatch& dispatch();

// The tiers of this build, from the lowest to the highest, separated by spaces.
std::string built_tiers();

}  // namespace hfca
