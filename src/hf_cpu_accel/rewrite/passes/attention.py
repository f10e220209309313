"""The attention in a program: the features of linears that it reads, its scale, rotation and masks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_cpu_accel.check import compare
from hf_cpu_accel.rewrite.attention.interface import attention_forward
from hf_cpu_accel.rewrite.capture.attention.attention_step import Attention
from hf_cpu_accel.rewrite.capture.program import Ref, Step
from hf_cpu_accel.rewrite.linear.layer import PackedLinear
from hf_cpu_accel.rewrite.passes.graph import Graph
from hf_cpu_accel.tolerance import FEATURE_NUMBERS

_INTERFACE = (
    "module",
    "query",
    "key",
    "value",
    "attention_mask",
    "dropout",
    "scaling",
    "is_causal",
    "position_bias",
)
_SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")
_UNSUPPORTED = ("dropout", "dropout_p", "softcap", "s_aux", "head_mask", "enable_gqa")
_ROW = 1 << 20  # numbers of the features of one token


@dataclass(frozen=True)
class Features:
    """Output features of a linear, from `first` on; their values were multiplied by `factor`."""

    linear: PackedLinear
    first: int
    factor: float = 1.0

    @property
    def offset(self) -> int:
        """Return their first index in the packed weight of the linear's group."""
        return self.linear.range[0] + self.first


@dataclass(frozen=True)
class AttentionCall:
    """One call of attention.

    Attributes:
        query, key, value: the features that they come from.
        scale: factor of the scores, None if it is unknown.
        bias: the bias of the scores, [1, heads, L, L], or None.
        causal: whether no token attended to later ones.
    """

    query: Features
    key: Features
    value: Features
    heads: int
    head_size: int
    scale: float | None
    bias: Tensor | None
    causal: bool = False


@dataclass(frozen=True)
class AttentionStep:
    """A step that computes attention.

    Attributes:
        operands: the refs of query, key [B, heads, L, D] and value.
        masks: refs that are added to the scores, or hide them.
        tokens_first: whether the result is [B, L, heads, D], the first of a tuple.
        is_plain: whether it does nothing else to scores.
    """

    step: Step
    operands: tuple[Ref, Ref, Ref]
    scale: float | None
    masks: tuple[Any, ...]
    causal: bool
    tokens_first: bool
    is_plain: bool


def attention_steps(graph: Graph) -> Iterator[AttentionStep]:
    """Yield the steps of a program that compute attention."""
    for step in graph.made.values():
        if step.function is attention_forward.__wrapped__:  # type: ignore[attr-defined]
            given = dict(zip(_INTERFACE, step.args, strict=False)) | step.kwargs
            causal = given.get("is_causal")
            causal = getattr(given["module"], "is_causal", True) if causal is None else causal
            yield _dispatched(step, given, "scaling", bool(causal), tokens_first=True)
        elif step.function is functional.scaled_dot_product_attention:
            given = dict(zip(_SDPA, step.args, strict=False)) | step.kwargs
            yield _dispatched(step, given, "scale", bool(given.get("is_causal")), tokens_first=False)
        elif isinstance(step.function, Attention):
            query, key, value, *masks = step.args
            call = step.function
            is_plain = not call.factors and not call.has_sink and call.softcap is None
            yield AttentionStep(
                step,
                (query, key, value),
                call.scale,
                tuple(masks),
                causal=False,
                tokens_first=False,
                is_plain=is_plain,
            )


def _dispatched(
    step: Step, given: dict[str, Any], scale: str, causal: bool, *, tokens_first: bool
) -> AttentionStep:
    masks = [given.get(name) for name in ("attention_mask", "attn_mask", "position_bias")]
    return AttentionStep(
        step,
        (given["query"], given["key"], given["value"]),
        given.get(scale),
        tuple(mask for mask in masks if mask is not None),
        causal,
        tokens_first,
        is_plain=not any(given.get(name) for name in _UNSUPPORTED),
    )


def read_attention(graph: Graph, found: AttentionStep, tables: tuple[Ref, ...]) -> AttentionCall | None:
    """Return the call of attention, or None if its operands are not the features of linears in heads.

    Args:
        tables: the inputs with the cosines and sines of rotary positions, or none.
    """
    query, key, value = found.operands
    turned = isinstance(found.step.function, Attention)  # its keys are [.., D, keys]
    parts = [
        _features(graph, query, tables),
        _features(graph, key, tables, transposed=turned),
        _features(graph, value, ()),
    ]
    if not found.is_plain or any(part is None or part[1:] != parts[0][1:] for part in parts):  # type: ignore[index]
        return None
    (of_query, heads, head_size), (of_key, _, _), (of_value, _, _) = parts  # type: ignore[misc]
    scale = (head_size**-0.5 if found.scale is None else found.scale) * of_query.factor * of_key.factor
    if of_value.factor != 1:
        return None
    return AttentionCall(of_query, of_key, of_value, heads, head_size, scale, None, found.causal)


def merged_rows(graph: Graph, found: AttentionStep, ref: Any) -> Tensor | None:
    """Return int64 [rows], the token of attention in each row of `ref`, if a row has its heads side by side."""
    query = graph.values[found.operands[0]]
    heads = _in_heads(query, graph.values[ref].shape[:-1].numel())
    batch, count, length, size = heads.shape
    numbers = _numbers(batch * length, count * size)
    given: Any = numbers.view(batch, length, count, size)
    given = (given, None) if found.tokens_first else given.transpose(1, 2).reshape(query.shape)
    try:
        merged = graph.evaluate(ref, {found.step.result: given}).flatten(0, -2)
    except ValueError:
        return None
    rows = (merged[:, 0] / _ROW).long()
    return rows if merged.shape == numbers.shape and torch.equal(merged, numbers[rows]) else None


def _numbers(rows: int, features: int) -> Tensor:
    """Return [rows, features], all different."""
    return torch.arange(rows, dtype=torch.float64)[:, None] * _ROW + torch.arange(1.0, features + 1)


def _in_heads(tensor: Tensor, rows: int) -> Tensor:
    """Return [B * heads, L, D] as [B, heads, L, D]."""
    return tensor.unflatten(0, (rows // tensor.shape[1], -1)) if tensor.dim() == 3 else tensor


def _features(
    graph: Graph, ref: Ref, tables: tuple[Ref, ...], *, transposed: bool = False
) -> tuple[Features, int, int] | None:
    """Return the features of a linear in `ref` [B, heads, L, D], rotated by the tables if it reads any; heads; and D.

    Args:
        transposed: whether it is [B, heads, D, L].
    """
    linears = graph.linears(ref)
    if len(linears) != 1:
        return None
    (step,) = linears
    linear, rows = step.leaf, graph.values[step.result].shape[:-1].numel()
    numbers = _numbers(rows, linear.out_features)
    given = numbers.view(graph.values[step.result].shape)

    def evaluated(cos: float, sin: float) -> Tensor:
        """Return [rows, heads, D]."""
        turns = [
            torch.full_like(graph.values[table], fill)
            for table, fill in zip(tables, (cos, sin), strict=False)
        ]
        heads = graph.evaluate(ref, {step.result: given, **dict(zip(tables, turns, strict=True))})
        return _in_heads(heads.mT if transposed else heads, rows).transpose(1, 2).flatten(0, 1)

    try:
        plain = evaluated(1.0, 0.0)
        if plain.dim() != 3 or plain.shape[0] != rows or plain.shape[2] < 2:
            return None
        if not set(tables).isdisjoint(graph.sources(ref)):
            half = plain.shape[2] // 2
            if not torch.equal(
                evaluated(0.0, 1.0), torch.cat([-plain[..., half:], plain[..., :half]], dim=-1)
            ):
                return None
    except ValueError:
        return None
    factor = float(plain[0, 0, 1] - plain[0, 0, 0])
    first = round(float(plain[0, 0, 0]) / factor) - 1 if factor else -1
    expected = numbers[:, first : first + plain.shape[1:].numel()]
    if first < 0 or not compare(plain.flatten(1), factor * expected).within(FEATURE_NUMBERS):
        return None
    return Features(linear, first, factor), *plain.shape[1:]
