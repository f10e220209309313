"""Replace calls of torch's `scaled_dot_product_attention` in layers that call it themselves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch.nn import functional

from hf_cpu_accel.rewrite.attention.processor import dot_product_attention
from hf_cpu_accel.rewrite.capture.program import Step


def with_our_attention(steps: Iterable[Step]) -> list[Step]:
    """Return `steps` with the attention of this package in place of torch's, if that draws no random numbers."""
    return [replace(step, function=dot_product_attention) if _may_be_ours(step) else step for step in steps]


def _may_be_ours(step: Step) -> bool:
    dropout = step.args[4] if len(step.args) > 4 else step.kwargs.get("dropout_p", 0.0)
    return step.function is functional.scaled_dot_product_attention and dropout == 0.0
