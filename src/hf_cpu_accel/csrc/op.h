// How an op is made known to torch.
#pragma once
#include <torch/csrc/stable/library.h>

// The op of this name, hfca::function, for tensors on the CPU; `signature` is its schema behind the name. To stand outside of namespaces.
#define HFCA_OP(function, signature) HFCA_OP_FOR(CPU, function, signature)

// The same for one whose arguments are no tensors.
#define HFCA_OP_WITHOUT_TENSORS(function, signature) HFCA_OP_FOR(CompositeExplicitAutograd, function, signature)

#define HFCA_OP_FOR(key, function, signature)                                    \
  STABLE_TORCH_LIBRARY_FRAGMENT(hf_cpu_accel, m) { m.def(#function signature); } \
  STABLE_TORCH_LIBRARY_IMPL(hf_cpu_accel, key, m) { m.impl(#function, TORCH_BOX(&hfca::function)); }
