"""The note of `explain` about the possible speedup with `accuracy=`, for models with default settings."""

from __future__ import annotations

import dataclasses

from torch import nn

from hf_cpu_accel.accuracy.candidates import bits_of, candidates, gain, generates
from hf_cpu_accel.plan import Plan

_MIN_SPEEDUP = 1.2


def with_gain(plan: Plan, model: nn.Module) -> Plan:
    """Add the note to the plan of an accelerated model if its dtype is "auto" and a smaller dtype is faster."""
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
    speedup = gain(dtype, plan.dtype, generates=generates(model))
    if speedup < _MIN_SPEEDUP:
        return plan
    basis = "bytes of weights per token" if generates(model) else "speed of products on this CPU"
    note = (
        f"accuracy=0.99 would use {dtype} where the accuracy allows it, with a speedup of up to {speedup:.1f}x over {plan.dtype} "
        f"(modeled from the {basis}, not measured)"
    )
    return dataclasses.replace(plan, notes=(*plan.notes, note))
