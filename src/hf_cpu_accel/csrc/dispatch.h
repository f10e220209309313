// The choice of kernels, made once at load.
#pragma once
#include "kernels.h"

namespace hfca {

struct Dispatch {
  const char* tier;  // "generic", "avx2", "avx2_vnni", "avx512", "avx512_vnni", "avx512_bf16"
  bool bf16_dot;     // bfloat16 GEMMs use the CPU's dot product
  Kernels kernels;   // of that tier; without bf16_dot, those for bfloat16 are of the tier below
};

// The best tier that the CPU runs and that the environment variable HF_CPU_ACCEL_ISA, if it names a tier, is not below ("amx" and
// unknown names do not cap).
const Dispatch& dispatch();

}  // namespace hfca
