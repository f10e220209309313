"""Locate the heads of query, key, value and gate among the features of a projection, and the ops on attention's output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_cpu_accel.ops.decoder.layers import Gate, Heads
from hf_cpu_accel.rewrite.decoder.head_norms import HeadNormParts, NormPart, normalize_heads
from hf_cpu_accel.rewrite.decoder.residuals import differ
from hf_cpu_accel.tolerance import SAME_DIRECTION, SAME_FACTOR


@dataclass(frozen=True)
class Found:
    """Located heads: `factor` is their multiplier (OPT scales its queries), `norm` the norm applied to them."""

    heads: Heads
    factor: float
    norm: NormPart | HeadNormParts | None


@dataclass(frozen=True)
class Finish:
    """The ops on attention's output before its projection; see `ops.decoder_layers.SelfAttention`."""

    sub_norm: NormPart | HeadNormParts | None = None
    gate: Gate | None = None


def find_finish(
    context: Tensor | None,
    given: Tensor,
    raw: Tensor,
    kv_heads: int,
    layer: nn.Module,
    norms: Sequence[NormPart],
    head_norms: Sequence[HeadNormParts],
) -> Finish | None:
    """Return the ops that map attention's output `context` [B, L, H, D] to `given` [B, L, H * D], the input of the output
    projection.

    The features of gates are among those of `raw` [B, L, N]. None: no known ops. If single heads are not visible (`context` is
    None, or has other features than the projection), the verification decides.
    """
    if context is None or context.flatten(-2).shape != given.shape:
        return Finish()
    heads = context.flatten(0, 1)
    target = given.view(context.shape).flatten(0, 1)
    for norm, made in _variants(heads, heads.shape[1], layer, norms, head_norms):
        if made.dim() == 4:
            made = made.diagonal(dim1=0, dim2=2).movedim(-1, 1)
        if not differ(made, target):
            return Finish(norm)
        gate = _find_gate((target / made).view(context.shape), raw, kv_heads, layer)
        if gate is not None:
            return Finish(norm, gate)
    return None


def _find_gate(factors: Tensor, raw: Tensor, kv_heads: int, layer: nn.Module) -> Gate | None:
    """Return the gate whose `factors` [B, L, H, D] are an activation of some of `raw`, or None."""
    alone = (factors - factors[..., :1]).abs().max() <= SAME_FACTOR * factors.abs().max()
    wanted = (factors[..., :1] if alone else factors).transpose(1, 2)
    activated = {"sigmoid": raw.sigmoid(), "softplus": functional.softplus(raw)}
    for activation, features in activated.items():
        found = find_heads(wanted, features, kv_heads, layer, (), ())
        if found is not None and found.factor == 1:
            return Gate(found.heads, wanted.shape[-1], activation)  # type: ignore[arg-type]
    return None


def find_heads(
    heads: Tensor,
    raw: Tensor,
    kv_heads: int,
    layer: nn.Module,
    norms: Sequence[NormPart],
    head_norms: Sequence[HeadNormParts],
) -> Found | None:
    """Locate `heads` [B, H, L, D] among the features of `raw` [B, L, N], unchanged or after one of the norms of `layer`.

    None if they are not there, or in an order that `Heads` cannot express.
    """
    count, width = heads.shape[1], heads.shape[3]
    target = heads.transpose(1, 2).flatten(0, 1)  # [T, H, D]
    rows = raw.flatten(0, 1)
    starts = torch.arange(0, rows.shape[1] - width + 1, width)
    if rows.shape[1] < count * width:
        return None
    windows = rows[:, starts[:, None] + torch.arange(width)]  # [T, W, D]
    for norm, candidates in _variants(windows, count, layer, norms, head_norms):
        places_of = _places_by_head if isinstance(norm, HeadNormParts) else _places
        found = places_of(target, candidates)
        if found is None:
            continue
        places, factor = found
        order = _order([int(starts[place]) for place in places], count // kv_heads)
        if order is not None:
            return Found(order, factor, norm)
    return None


def repeats_of(heads: Tensor) -> int:
    """Return how many adjacent heads of `heads` [B, H, L, D] are equal: Falcon repeats keys and values before it stores them."""
    count = heads.shape[1]
    for repeats in range(count, 1, -1):
        if count % repeats == 0:
            groups = heads.unflatten(1, (-1, repeats))
            if torch.equal(groups, groups[:, :, :1].expand_as(groups)):
                return repeats
    return 1


def _variants(
    windows: Tensor,
    count: int,
    layer: nn.Module,
    norms: Sequence[NormPart],
    head_norms: Sequence[HeadNormParts],
) -> Iterator[tuple[NormPart | HeadNormParts | None, Tensor]]:
    """Yield the windows [T, W, D] unchanged, and after each norm; [H, T, W, D] if it has weights for each head."""
    width = windows.shape[-1]
    yield None, windows
    for part in norms:
        module = layer.get_submodule(part.path)
        weight = module._parameters.get("weight")
        if weight is None or weight.shape[0] == width:
            yield part, part.spec.reference(module, windows)
        if weight is not None and weight.shape[0] == count * width and count > 1:
            for first in range(windows.shape[1] - count + 1):
                yield part, _normed_together(part, module, windows, first, count)
    for own in head_norms:
        stacked = [own.stacked(layer, name) for name in ("weight", "bias")]
        if stacked[0] is not None and stacked[0].shape == (count, width):
            scale, shift = (None if part is None else part[:, None, None] for part in stacked)
            yield own, normalize_heads(own.spec, windows.expand(count, *windows.shape), scale, shift)


def _normed_together(part: NormPart, module: nn.Module, windows: Tensor, first: int, count: int) -> Tensor:
    """Return the windows with those of `count` heads from `first` on normalized as one; the others are not used then."""
    normed = torch.full_like(windows, torch.nan)
    together = windows[:, first : first + count].flatten(1)
    normed[:, first : first + count] = part.spec.reference(module, together).unflatten(1, (count, -1))
    return normed.nan_to_num()


def _places_by_head(heads: Tensor, windows: Tensor) -> tuple[list[int], float] | None:
    """Return `_places` for head h among the windows [h, T, W, D]."""
    places, factors = [], []
    for head, candidates in zip(heads.transpose(0, 1), windows, strict=True):
        found = _places(head[:, None], candidates)
        if found is None:
            return None
        places += found[0]
        factors.append(found[1])
    alike = max(factors) - min(factors) <= SAME_FACTOR * max(factors)
    return (places, factors[0]) if alike else None


def _places(heads: Tensor, windows: Tensor) -> tuple[list[int], float] | None:
    """Return for each of the heads [T, H, D] the window [T, W, D] with the same values times one factor, or None."""
    ours = heads.transpose(0, 1).flatten(1)
    theirs = windows.transpose(0, 1).flatten(1)
    lengths = theirs.norm(dim=1).clamp_min(1e-30)
    cosines = (ours / ours.norm(dim=1, keepdim=True).clamp_min(1e-30)) @ (theirs / lengths[:, None]).T
    best = cosines.max(dim=1)
    if (1 - best.values).max() > SAME_DIRECTION:
        return None
    factors = ours.norm(dim=1) / lengths[best.indices]
    factor = factors.mean().item()
    if (factors - factor).abs().max() > SAME_FACTOR * factor:
        return None
    return best.indices.tolist(), 1.0 if abs(factor - 1) < SAME_FACTOR else factor


def _order(firsts: list[int], group: int) -> Heads | None:
    """Return the `Heads` with exactly these first features and `group` heads per key head, or None."""
    stride = firsts[group] - firsts[0] if len(firsts) > group else 0
    step = firsts[1] - firsts[0] if group > 1 else 0
    order = Heads(firsts[0], stride, step)
    expected = [order.first + h // group * stride + h % group * step for h in range(len(firsts))]
    apart = stride >= 0 and (step > 0 or group == 1)
    return order if apart and firsts == expected else None
