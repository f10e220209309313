"""The line of `explain` that tells those who have asked for nothing what `accuracy` may gain."""

from __future__ import annotations

import dataclasses

from torch import nn

from hf_cpu_accel.accuracy.candidates import bits_of, candidates, gain, generates
from hf_cpu_accel.plan import Plan

_WORTH_TELLING = 1.2


def with_gain(plan: Plan, model: nn.Module) -> Plan:
    """`plan` of an accelerated `model` with one more note, where its dtype was left to us and a narrower one is faster."""
    config = plan.config
    if (
        config is None
        or (config.dtype, config.accuracy, config.dtypes) != ("auto", None, ())
        or not plan.packed_bytes
    ):
        return plan
    if plan.choices or plan.dtype not in ("float32", "bfloat16"):
        return plan  # from a packed file
    weights = int(plan.packed_bytes * 8 / bits_of(plan.dtype))
    dtype = candidates(model, weights)[0]
    times = gain(dtype, plan.dtype, generates=generates(model))
    if times < _WORTH_TELLING:
        return plan
    what = (
        "bytes of weights for each token" if generates(model) else "products by the instructions of this CPU"
    )
    note = (
        f"accuracy=0.99 would use {dtype} where that keeps it, up to {times:.1f}x as fast as {plan.dtype} (modeled from "
        f"the {what}, not measured here)"
    )
    return dataclasses.replace(plan, notes=(*plan.notes, note))
