"""Attention modules of diffusers compute through a processor, whose attention calls this package replaces.

A processor is a plain object that the host may replace at any time: an IP-Adapter has its own, a user sets one. All of them call
`scaled_dot_product_attention` (the `native` backend of `dispatch_attention_fn` is that call, too). So the module keeps its
processor, and while its forward runs, that one function is replaced.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._device import DeviceContext

from hf_cpu_accel.check import compare
from hf_cpu_accel.ops.attention import attention
from hf_cpu_accel.ops.derivatives import wants_derivative
from hf_cpu_accel.patching.inner_forward import InnerForward, has_place, put_inside
from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.providers.attention import LONG, torch_is_faster
from hf_cpu_accel.rewrite.core.context import Context
from hf_cpu_accel.rewrite.core.rule import Match, Outcome
from hf_cpu_accel.runtime import hardware
from hf_cpu_accel.runtime.torch_modes import AroundFunctions
from hf_cpu_accel.tolerance import PACKED

STRUCTURE = "attention"
_REPLACED = "scaled_dot_product_attention"
_DISPATCH = "dispatch_attention_fn"
# Dtypes of weights that round activations to bfloat16 or beyond.
_ROUNDED = ("bfloat16", "int8", "int4")


@dataclass(frozen=True)
class AttentionConfig:
    """The settings of attention.

    Attributes:
        bf16_intermediates: whether float32 over long sequences is computed in bfloat16, as other products of the model are, or
            in integers.
        measured: whether torch serves where it is faster.
    """

    bf16_intermediates: bool = False
    measured: bool = False


PLAIN = AttentionConfig()


class OurAttention(AroundFunctions):
    """Mode in which `scaled_dot_product_attention` runs on this package's op where that supports the call."""

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__(
            partial(_answer, config)
        )  # not a method: a reference cycle would leave garbage in each call


def _answer(config: AttentionConfig, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func is functional.scaled_dot_product_attention and not _has_other_modes():
        return dot_product_attention(*args, **kwargs, config=config)
    return func(*args, **kwargs)


def _has_other_modes() -> bool:
    """Return whether modes of other libraries are active, such as that of guidance which skips attention scores.

    torch calls the inner mode first, which is this package's. A default device is a mode, too, and changes nothing here.
    """
    modes: list[Any] = getattr(torch.overrides, "_get_current_function_mode_stack", list)()
    return any(not isinstance(mode, OurAttention | DeviceContext) for mode in modes)


def dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    config: AttentionConfig = PLAIN,
) -> Tensor:
    """Compute `torch.nn.functional.scaled_dot_product_attention`, which serves all calls that the op does not support.

    Args:
        query, key, value: [B, H, L, D].
        attn_mask: None, or bool (True = attend) or float (added), broadcastable to [B, H, Lq, Lk].
        is_causal: aligned to the first key, as in torch.

    Returns:
        [B, H, Lq, Dv], a view of [B, Lq, H, Dv].
    """
    ours = (
        not dropout_p
        and query.dim() == key.dim() == value.dim() == 4
        and query.dtype in (torch.float32, torch.bfloat16)
        and query.dtype is key.dtype is value.dtype
        and query.shape[0] == key.shape[0] == value.shape[0]
        and key.shape[1:3] == value.shape[1:3]
        and query.shape[3] == key.shape[3] > 0
        and (query.shape[1] == key.shape[1] or (enable_gqa and query.shape[1] % max(key.shape[1], 1) == 0))
        and not (is_causal and (attn_mask is not None or query.shape[2] != key.shape[2]))
        and (attn_mask is None or attn_mask.dtype in (torch.bool, query.dtype))
        and not wants_derivative(query, key, value)
    )
    long = ours and query.dtype is torch.float32 and key.shape[2] >= LONG
    if not ours or (
        long and not config.bf16_intermediates and config.measured and torch_is_faster(query.shape[3])
    ):
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if attn_mask is not None and attn_mask.dim() < 4:
        # Two dimensions are queries and keys for torch, but key padding for our op.
        attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
    heads = (query, key, value)
    if long and config.bf16_intermediates:
        heads = query.bfloat16(), key.bfloat16(), value.bfloat16()
    output = attention(*heads, mask=attn_mask, is_causal=is_causal, scale=scale).transpose(1, 2)
    return output.to(query.dtype)


class ProcessorForward(InnerForward):
    """The forward of an attention module, with this package's attention in place of torch's."""

    def __init__(self, module: nn.Module, config: AttentionConfig) -> None:
        super().__init__(module)
        self.config = config

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (
            not self.is_on or torch.compiler.is_compiling()
        ):  # the compiler needs torch's function in the graph
            return self.__wrapped__(*args, **kwargs)
        with OurAttention(self.config):
            return self.__wrapped__(*args, **kwargs)


class ProcessorAttentionRule:
    """Swap no module: a forward of this package runs in place of the class's, see `inner_forward`, and is removed by `restore`."""

    name = "processor attention"

    def match(self, module: nn.Module, path: str, context: Context) -> Match | None:
        if "diffusers" not in sys.modules or not _has_processor(module):
            return None
        return Match(module, path, _unsupported_reason(module, path, context))

    def apply(self, match: Match, context: Context) -> Outcome:
        reason = match.data or (_verify(match.module) if context.config.verify else None)
        if reason is not None:
            return Outcome((PlanItem.left(match.path, STRUCTURE, reason),), ())
        rounded = context.dtypes.inside(match.path, match.module) <= set(_ROUNDED)
        bf16_intermediates = rounded and hardware.native_bf16_is_fast()
        forward = ProcessorForward(match.module, AttentionConfig(bf16_intermediates, context.measured))
        put_inside(context.journal, match.module, forward)
        dtype = "bfloat16" if bf16_intermediates else "float32"
        item = PlanItem(match.path, STRUCTURE, "attention", dtype, packed_bytes=0, reason=None)
        return Outcome((item,), ())


def _has_processor(module: nn.Module) -> bool:
    """Return whether the forward of `module` calls `module.processor`."""
    code = getattr(type(module).forward, "__code__", None)
    return code is not None and "processor" in code.co_names and callable(getattr(module, "processor", None))


def _unsupported_reason(module: nn.Module, path: str, context: Context) -> str | None:
    if context.skipped(path):
        return "skip_modules"
    if not has_place(module):
        return "it has a forward of its own"
    processor: Any = module.processor
    code = getattr(type(processor).__call__, "__code__", None)
    if code is None or not {_REPLACED, _DISPATCH} & set(code.co_names):
        return f"its {type(processor).__name__} does not call scaled_dot_product_attention"
    return None


def _verify(module: nn.Module) -> str | None:
    """Return the difference of attention from torch's, with the head size of `module`, or None."""
    width, heads = (getattr(module, name, None) for name in ("inner_dim", "heads"))
    head_dim = width // heads if isinstance(width, int) and isinstance(heads, int) and heads else 64
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, length, 2, head_dim, generator=generator).transpose(1, 2) for length in (5, 7, 7)
    )
    mask = torch.randn(2, 1, 1, 7, generator=generator)
    with torch.no_grad():
        ours = dot_product_attention(query, key, value, mask)
        theirs = functional.scaled_dot_product_attention(query, key, value, mask)
    return compare(ours, theirs).reason(PACKED.float32)
