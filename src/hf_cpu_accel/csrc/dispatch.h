// The choice of kernels, made once at load.
#pragma once
#include "kernels.h"

namespace hfca {

struct Dispatch {
  const char* tier;        // "generic", "avx2", "avx2_vnni", "avx512", "avx512_vnni", "avx512_bf16"
  bool bf16_dot;           // bfloat16 GEMMs use the CPU's dot product
  GemmKernels gemm[weight_kinds];  // by WeightKind; int4 for few rows
  GemmKernels gemm_int4_unpacked;
  QuantizeImageKernels images;
  GatherKernels pixels;
  WinogradOutputKernel winograd_output;
  AttentionKernels attention;
  NormKernels norm;
  GroupNormKernels group_norm;
  HeadKernels heads;
  TokenRowKernels token_rows;
  RotaryEmbeddingKernel rotary_embedding;
  SparseKernels sparse;
  MessageKernels messages;
  EmbeddingNormKernel embedding_norm;
  CombineKernel combine;
  QuantizeInt4Kernel quantize_int4;
  double (*multiply_adds)(WeightKind, int64_t);
  float (*read_stream)(const float*, int64_t);
};

// The best tier that the CPU runs and that the environment variable HF_CPU_ACCEL_ISA, if it names a tier, is not below ("amx" and
// unknown names do not cap).
const Dispatch& dispatch();

}  // namespace hfca
