// The table of kernels that a tier offers: the only list of them. Plain data: one translation unit per tier fills it (tier.cpp), and
// Dispatch holds that of the tier that was chosen.
#pragma once
#include "attention/attention.h"
#include "attention/deformable.h"
#include "convolution/quantize.h"
#include "convolution/gather.h"
#include "convolution/pointwise.h"
#include "convolution/tile_places.h"
#include "convolution/winograd.h"
#include "decoder/heads.h"
#include "embedding/embedding.h"
#include "encoder/token_rows.h"
#include "experts/combine.h"
#include "gemm/gemm.h"
#include "norm/group_norm.h"
#include "norm/norm.h"
#include "quantize/int4.h"
#include "quantize/rotated.h"
#include "recurrent/recurrent.h"
#include "rope/rope.h"
#include "snake/snake.h"
#include "sparse/messages.h"
#include "sparse/sparse.h"

namespace hfca {

struct Kernels {
  GemmKernels gemm[weight_kinds];               // by WeightKind
  GemmKernels gemm_of_many_rows[weight_kinds];  // for GEMMs of more than the most_rows of those
  QuantizeImageKernels images;
  GatherKernels pixels;
  WinogradOutputKernel winograd_output;
  AttentionKernels attention;
  DeformableAttentionKernel deformable_attention;
  NormKernels norm;
  GroupNormKernels group_norm;
  HeadKernels heads;
  TokenRowKernels token_rows;
  RotaryEmbeddingKernel rotary_embedding;
  SnakeKernel snake;
  RecurrentKernels recurrent;
  SparseKernels sparse;
  MessageKernels messages;
  EmbeddingNormKernel embedding_norm;
  CombineKernel combine;
  QuantizeInt4Kernel quantize_int4;
  PackRotatedKernel pack_rotated;
  double (*multiply_adds)(WeightKind, int64_t iterations);  // runs the inner instruction of a GEMM, returns the operations done
  float (*read_stream)(const float*, int64_t n);                // reads n floats (a multiple of 128)
  ImageTilesKernels image_tiles;                                // null where there are no tiles
  PointwiseKernels pointwise;
};

// Tables per tier. A tier that adds only an instruction for one type (VNNI, BF16) is compiled whole: its other kernels are those of
// avx2 or avx512 under another name. A build may leave out all tiers except generic (HF_CPU_ACCEL_TIERS in setup.py): the address of a
// tier that it leaves out is null.
const Kernels& kernels_generic();
#if defined(HFCA_X86)
[[gnu::weak]] const Kernels& kernels_avx2();
[[gnu::weak]] const Kernels& kernels_avx2_vnni();
[[gnu::weak]] const Kernels& kernels_avx512();
[[gnu::weak]] const Kernels& kernels_avx512_vnni();
[[gnu::weak]] const Kernels& kernels_avx512_bf16();
#elif defined(HFCA_ARM)
[[gnu::weak]] const Kernels& kernels_neon_dotprod();
[[gnu::weak]] const Kernels& kernels_neon_i8mm_bf16();
#endif

}  // namespace hfca
