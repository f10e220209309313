// Which product of a step comes after which: see ask_for() of ../gemm/driver.h.
#pragma once
#include "decoder_layers.h"

namespace hfca {

// Tell each product of few rows which one comes next.
inline void follow(DecoderCall& call) {
  Gemm* last = nullptr;
  for (DecoderLayer& layer : call.layers)
    for (Gemm* g :
         {&layer.qkv, &layer.recurrence.rest, &layer.recurrence.selected, &layer.recurrence.steps, &layer.output, &layer.cross_query,
          &layer.cross_output, &layer.router.logits, &layer.up, &layer.down, &layer.per_layer_gate, &layer.per_layer_output}) {
      if (g->n == 0) continue;
      if (last) last->following = g;
      last = g;
    }
}

}  // namespace hfca
