// From an op's arguments to a mixture of experts.
#pragma once
#include "../gemm/arguments.h"
#include "experts.h"

namespace hfca {

// up: the packed weights of all experts one after another, [experts * (2 if gated) * intermediate, features]; down likewise.
inline Mixture mixture_of(const char* op, Gemm up, const Gemm& down, int64_t experts, int64_t top_k, int64_t intermediate, int64_t features,
                          Activation activation, bool gated, double limit) {
  STD_TORCH_CHECK(experts >= 1 && experts <= INT32_MAX && 1 <= top_k && top_k <= std::min(experts, max_top_k), "hf_cpu_accel::", op,
                  ": tokens must go to 1 to ", max_top_k, " of the experts");
  STD_TORCH_CHECK(features % panel_columns == 0 && intermediate % panel_columns == 0, "hf_cpu_accel::", op,
                  ": the widths of experts must be multiples of ", panel_columns);
  STD_TORCH_CHECK(limit >= 0.0, "hf_cpu_accel::", op, ": limit must be 0 for none, or more");
  up.activation = activation, up.gated = gated, up.limit = static_cast<float>(limit);
  Mixture m;
  m.experts = experts, m.top_k = top_k, m.intermediate = intermediate, m.up = up, m.down = down;
  return m;
}

inline double multiply_adds(const Mixture& m, int64_t tokens) {
  double products = 0;
  for (const Gemm* side : {&m.up, &m.down}) {
    const int64_t features = side->n / m.experts * m.top_k;  // n is a multiple of experts
    products += static_cast<double>(features) * static_cast<double>(side->k);
  }
  for (const Gemm* side : {&m.shared_up, &m.shared_down}) products += static_cast<double>(side->n) * static_cast<double>(side->k);
  return products * static_cast<double>(tokens);
}

}  // namespace hfca
