"""Attention that a layer has torch compute: `scaled_dot_product_attention`, by our op."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_cpu_accel.ops.attention import attention
from hf_cpu_accel.rewrite.recorded.program import Step

_DTYPES = (torch.float32, torch.bfloat16)


def with_our_attention(steps: Iterable[Step]) -> list[Step]:
    """`steps` with ours in the place of torch's."""
    return [replace(step, function=torch_attention) if _may_be_ours(step) else step for step in steps]


def torch_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **how: Any,
) -> Tensor:
    """As `torch.nn.functional.scaled_dot_product_attention` without dropout, which computes what our op does not: queries of other
    than four dimensions, and causal ones of another length than the keys, which it counts from the first."""
    causal_fits = not is_causal or query.shape[-2] == key.shape[-2]
    if query.dim() != 4 or {query.dtype, key.dtype, value.dtype} - set(_DTYPES) or not causal_fits:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, **how
        )
    mask = attn_mask if attn_mask is None else attn_mask[(None,) * (4 - attn_mask.dim())]
    output = attention(query, key, value, mask=mask, is_causal=is_causal, scale=how.get("scale"))
    return output.transpose(1, 2)


def _may_be_ours(step: Step) -> bool:
    if step.function is not functional.scaled_dot_product_attention or step.effect:
        return False
    dropout = step.args[4] if len(step.args) > 4 else step.kwargs.get("dropout_p", 0.0)
    return dropout == 0.0
