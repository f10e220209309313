// What a layer with a recurrent state has in the place of attention, between its projections: see ../recurrent/recurrent.h.
#pragma once
#include <algorithm>

#include "../dispatch.h"
#include "../gemm/driver.h"
#include "../norm/optional_norm.h"
#include "../recurrent/recurrent.h"

namespace hfca {

struct Recurrence {
  RecurrenceKind kind = RecurrenceKind::none;
  Gemm rest;  // a second product of the same input, for what the first does not give; n = 0: none
  CausalConv conv;
  DeltaRule delta;
  StateSpace space;
  SelectiveScan scan;
  Gemm selected, steps;  // of a selective scan: of what comes out of the convolution dt, B and C, and of that dt the scan's
  OptionalNorm selected_norms[3];
  Matrix parts[3];  // dt, B and C in the output of `selected`
  GatedNorm norm;
  GatedRows rows;

  bool exists() const { return kind != RecurrenceKind::none; }
  bool finishes() const { return exists() && kind != RecurrenceKind::selective_scan; }  // else its output is in its place already
  int64_t buffer() const {  // floats of each thread
    const int64_t state = kind == RecurrenceKind::gated_delta_net ? dispatch().kernels.recurrent.delta_rule_buffer(delta) : 0;
    const int64_t scanning = kind == RecurrenceKind::selective_scan ? scan.buffer() : 0;
    const int64_t norms = kind == RecurrenceKind::selective_scan ? norm_buffer_rows * selected.n : 0;
    return std::max({conv.buffer(), state, scanning, norms, norm.columns});
  }
  double work() const {  // multiply-adds
    const int64_t tokens = conv.batch * conv.length;
    return static_cast<double>(tokens * conv.channels * conv.taps) +
           3.0 * static_cast<double>(tokens * (delta.heads * delta.key_dim * delta.value_dim +
                                               space.heads * space.head_dim * space.state_dim + scan.channels * scan.state_dim));
  }
};

// The projections between convolution and recurrence, their norms and the recurrence.
inline void scan(const Team& team, const Recurrence& r, const GemmMemory& memory, float* buffer) {
  Gemm selected = r.selected, steps = r.steps;
  selected.input = {r.conv.output, r.conv.channels};
  run_gemm(team, selected, memory);
  if (r.selected_norms[0].exists()) {
    team.each(r.scan.batch * r.scan.length, [&](int64_t begin, int64_t end) {
      for (int i = 0; i < 3; ++i) r.selected_norms[i].run(r.parts[i], r.parts[i], begin, end, buffer);
    });
  }
  steps.input = r.parts[0];
  run_gemm(team, steps, memory);
  team.each(r.scan.pieces(), [&](int64_t begin, int64_t end) { dispatch().kernels.recurrent.selective_scan(r.scan, begin, end, buffer); });
}

// Of what `input`, the normed hidden states, and the first product of it give. What is left is row by row: see finish().
inline void recur(const Team& team, const Recurrence& r, const Matrix& input, const GemmMemory& memory, float* buffer) {
  const RecurrentKernels& kernels = dispatch().kernels.recurrent;
  if (r.rest.n > 0) {
    Gemm rest = r.rest;
    rest.input = input;
    run_gemm(team, rest, memory);
  }
  team.each(r.conv.pieces(), [&](int64_t begin, int64_t end) { kernels.causal_conv(r.conv, begin, end, buffer); });
  if (r.kind == RecurrenceKind::gated_delta_net)
    team.each(r.delta.pieces(), [&](int64_t begin, int64_t end) { kernels.delta_rule(r.delta, begin, end, buffer); });
  if (r.kind == RecurrenceKind::selective_scan) scan(team, r, memory, buffer);
  if (r.kind == RecurrenceKind::state_space)
    team.each(r.space.pieces(), [&](int64_t begin, int64_t end) { kernels.state_space(r.space, begin, end); });
}

// Gate and norm of rows [begin, end), to rows of `out`.
inline void finish(const Recurrence& r, int64_t begin, int64_t end, float* out, float* buffer) {
  const RecurrentKernels& kernels = dispatch().kernels.recurrent;
  if (r.kind == RecurrenceKind::short_convolution) {
    GatedRows rows = r.rows;
    rows.output = {out, rows.columns};
    return kernels.gated_rows(rows, begin, end);
  }
  GatedNorm norm = r.norm;
  norm.output = {out, norm.groups * norm.columns};
  kernels.gated_norm(norm, begin * norm.groups, end * norm.groups, buffer);
}

}  // namespace hfca
