// Compiled once per tier by the build, which sets the instruction set flags, HFCA_TIER (the namespace) and HFCA_SIMD_*.
#include "kernels.h"

#include "attention/deformable_rows.h"
#include "attention/flash.h"
#include "convolution/quantize_rows.h"
#include "convolution/gather_rows.h"
#include "convolution/pointwise_rows.h"
#include "decoder/head_rows.h"
#include "embedding/embedding_rows.h"
#include "encoder/token_row_steps.h"
#include "experts/combine_rows.h"
#include "gemm/affine.h"
#include "gemm/float_rows.h"
#include "gemm/int4.h"
#include "gemm/int8_weight.h"
#include "gemm/microkernel.h"
#include "gemm/mmla.h"
#include "gemm/signs.h"
#include "norm/group_norm_rows.h"
#include "norm/norm_rows.h"
#include "probe/limits.h"
#include "quantize/int4_search.h"
#include "quantize/rotated_panels.h"
#include "recurrent/state_space_rows.h"
#include "rope/rope_rows.h"
#include "snake/snake_rows.h"
#include "sparse/edge_rows.h"
#include "sparse/message_rows.h"

#define HFCA_CONCAT_(a, b) a##b
#define HFCA_CONCAT(a, b) HFCA_CONCAT_(a, b)

namespace hfca {

const Kernels& HFCA_CONCAT(kernels_, HFCA_TIER)() {
#if HFCA_DOT_BF16
  using Bf16 = HFCA_TIER::DotBf16;
#else
  using Bf16 = HFCA_TIER::DotBf16Widen;
#endif
  static constexpr Kernels table{
      {
          HFCA_TIER::TierGemm<HFCA_TIER::DotF32>::kernels(),
          HFCA_TIER::TierGemm<Bf16>::kernels(),
          HFCA_TIER::Int8Gemm::kernels(),
          HFCA_TIER::Int8WeightGemm::kernels(),
          HFCA_TIER::Int4Gemm::kernels(),
          HFCA_TIER::Int8Gemm::kernels_of_words(),
          HFCA_TIER::AffineGemm<4>::kernels(),
          HFCA_TIER::AffineGemm<8>::kernels(),
          HFCA_TIER::FloatRowsGemm::kernels(),
      },
      {{}, {}, {}, {}, HFCA_TIER::Int4Gemm::unpacked_kernels(), {}, {}, {}, HFCA_TIER::FloatRowsGemm::unpacked_kernels()},
      HFCA_TIER::quantize_image_kernels(),
      HFCA_TIER::gather_kernels(),
      &HFCA_TIER::winograd_output,
      HFCA_TIER::attention_kernels(),
      &HFCA_TIER::deformable_attention,
      HFCA_TIER::norm_kernels(),
      HFCA_TIER::group_norm_kernels(),
      HFCA_TIER::head_kernels(),
      HFCA_TIER::token_row_kernels(),
      &HFCA_TIER::rotary_embedding,
      &HFCA_TIER::snake,
      HFCA_TIER::recurrent_kernels(),
      HFCA_TIER::sparse_kernels(),
      HFCA_TIER::message_kernels(),
      &HFCA_TIER::embedding_norm,
      &HFCA_TIER::combine_rows,
      &HFCA_TIER::quantize_int4,
      &HFCA_TIER::pack_rotated,
      &HFCA_TIER::multiply_adds,
      &HFCA_TIER::read_stream,
      {},
      HFCA_TIER::pointwise_kernels(),
  };
#if HFCA_MMLA
  static constexpr Kernels with_pairs = HFCA_TIER::with_pairs(table);
  return with_pairs;
#else
  return table;
#endif
}

}  // namespace hfca
