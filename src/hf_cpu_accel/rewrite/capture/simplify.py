"""Fuse steps: ops after a linear join it, as `ops.linear` and `ops.ffn` support."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_cpu_accel.providers.route import Route
from hf_cpu_accel.rewrite.capture.attention.handwritten import join_attention
from hf_cpu_accel.rewrite.capture.attention.scaled_dot_product import with_our_attention
from hf_cpu_accel.rewrite.capture.normal_forms import (
    with_sizes_of_operands,
    without_einsum,
    without_expansions,
    without_maxima,
    without_needless_writes,
)
from hf_cpu_accel.rewrite.capture.program import Ref, Step, refs_in, replace_refs
from hf_cpu_accel.rewrite.capture.scalars import with_numbers
from hf_cpu_accel.rewrite.capture.shared_states import KEEP
from hf_cpu_accel.rewrite.capture.weight_products import with_our_products
from hf_cpu_accel.rewrite.core.activations import identify
from hf_cpu_accel.rewrite.linear.dispatch import FFNWork
from hf_cpu_accel.rewrite.linear.ffn import FusedFFN
from hf_cpu_accel.rewrite.linear.layer import PackedLinear

_DROPOUTS = (functional.dropout, torch.dropout, functional.dropout1d, functional.dropout2d)
_SUMS = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__)
_POINTWISE = (
    *(
        functional.gelu,
        functional.silu,
        functional.relu,
        functional.hardswish,
        functional.sigmoid,
        functional.tanh,
    ),
    *(torch.relu, torch.sigmoid, torch.tanh, Tensor.relu, Tensor.sigmoid, Tensor.tanh),
)


@dataclass
class Steps:
    """Steps and their output, which are changed in place."""

    steps: list[Step]
    output: Any

    def normalized(self) -> Steps:
        """Reduce the steps to the forms that matchers support."""
        self._drop_dropouts()
        self.steps = without_maxima(without_expansions(with_sizes_of_operands(self.steps)))
        self.steps = self.without_unread().steps
        self.steps = with_sizes_of_operands(without_needless_writes(self.steps, self._reads()))
        self.steps = with_numbers(without_einsum(self.steps))
        return self

    def simplified(self) -> Steps:
        self.normalized()
        self.steps = with_our_products(self.steps)
        self.steps = self.without_unread().steps
        self._join()
        self.steps = self.without_unread().steps
        return self

    def _join(self) -> None:
        """Join steps if no step between them writes to tensors that they may read."""
        parts = _between_writes(self.steps)
        reads = self._reads()
        joined: list[Step] = []
        for part in parts:
            elsewhere = reads - Counter(ref for step in part for ref in step.reads)
            inner = Steps(part, [step.result for step in part if elsewhere[step.result]])
            inner.steps = with_our_attention(join_attention(inner.steps, Counter(inner.output)))
            inner._join_ffns()
            inner._join_sums()
            joined += inner.steps
        self.steps = joined

    def _drop_dropouts(self) -> None:
        kept: list[Step] = []
        same: dict[Ref, Ref] = {}
        for step in self.steps:
            step = _with(step, same)
            if step.function in _DROPOUTS and not step.effect and isinstance(step.args[0], Ref):
                same[step.result] = step.args[0]
            else:
                kept.append(step)
        self.steps, self.output = kept, replace_refs(self.output, lambda ref: same.get(ref, ref))

    def _join_ffns(self) -> None:
        """Join down(activation(up(x))) into one op."""
        made, reads = self._made(), self._reads()
        for down in list(self.steps):
            activated = made.get(_first(down)) if _is_alone(down) else None
            if activated is None or activated.function not in _POINTWISE or reads[activated.result] > 1:
                continue
            up = made.get(_first(activated))
            if up is None or not _is_alone(up) or reads[up.result] > 1 or activated.effect:
                continue
            name = identify(partial(_activated, activated))
            if name is not None and up.leaf.permutation is None and down.leaf.permutation is None:
                self._put(down, _Fed(up.leaf, down.leaf, name), up.args[:1], drop=(up, activated))

    def _join_sums(self) -> None:
        """Join residual + linear(x), or residual + a feed-forward network, into one op."""
        for total in list(self.steps):
            if total.function not in _SUMS or total.kwargs or len(total.args) != 2:
                continue
            made, reads = self._made(), self._reads()
            for branch, other in (total.args[::-1], total.args):
                step = made.get(branch) if isinstance(branch, Ref) else None
                if (
                    step is None
                    or reads[step.result] > 1
                    or not isinstance(other, Ref)
                    or len(step.args) != 1
                ):
                    continue
                plus = _plus(step)
                if plus is not None:
                    self._put(total, plus, (step.args[0], other), drop=(step,))
                    break

    def without_unread(self) -> Steps:
        read = set(refs_in(self.output))
        kept = []
        for step in reversed(self.steps):
            if step.effect or step.result in read:
                read.update(step.reads)
                kept.append(step)
        return Steps(kept[::-1], self.output)

    def _put(self, step: Step, function: Any, args: tuple[Any, ...], drop: tuple[Step, ...]) -> None:
        made = replace(step, function=function, args=args, kwargs={}, leaf=None)
        self.steps = [made if old is step else old for old in self.steps if old not in drop]

    def _made(self) -> dict[Any, Step]:
        return {step.result: step for step in self.steps}

    def _reads(self) -> Counter[Ref]:
        reads = Counter(ref for step in self.steps for ref in step.reads)
        reads.update(refs_in(self.output))
        return reads


class _Fed:
    """A feed-forward network as one function."""

    def __init__(self, up: PackedLinear, down: PackedLinear, activation: str) -> None:
        self.up, self.down, self.activation = up, down, activation
        self.route = self.with_residual(residual=False)

    def with_residual(self, *, residual: bool) -> Route:
        up, down = (linear.group.part(linear.index, linear.index) for linear in (self.up, self.down))
        return Route(FFNWork(up, down, self.activation, residual=residual), measured=self.up.group.measured)

    def __call__(self, input: Tensor) -> Tensor:
        output: Tensor = self.route(input)
        return output


class _Plus:
    """residual + the output of a route, as one function."""

    def __init__(self, route: Route, plain: Callable[[Tensor], Tensor], features: int) -> None:
        self.route, self.plain, self.features = route, plain, features

    def __call__(self, input: Tensor, residual: Tensor) -> Tensor:
        if (
            residual.shape[:-1] != input.shape[:-1]
            or residual.shape[-1] != self.features
            or residual.dtype is not input.dtype
        ):
            return residual + self.plain(input)
        output: Tensor = self.route(input, residual)
        return output


def _plus(step: Step) -> _Plus | None:
    if _is_alone(step):
        linear = step.leaf
        return _Plus(
            linear.group.fused_route(linear.index, "none", residual=True), linear.forward, linear.out_features
        )
    if isinstance(step.function, _Fed):
        fed = step.function
        return _Plus(fed.with_residual(residual=True), fed, fed.down.out_features)
    if isinstance(step.leaf, FusedFFN):
        found = step.leaf.feed_forward
        up, down = step.leaf.packed_child(found.up), step.leaf.packed_child(found.down)
        fed = _Fed(up, down, found.activation)
        return _Plus(fed.with_residual(residual=True), fed, down.out_features)
    return None


def _is_alone(step: Step) -> bool:
    """Return whether the step is a linear that is computed separately, with one input."""
    if (
        getattr(type(step.leaf), "forward", None) is not PackedLinear.forward
    ):  # the forward of a convolution transposes its input
        return False
    return len(step.leaf.group.ranges) == 1 and len(step.args) == 1


def _activated(step: Step, values: Tensor) -> Any:
    return step.function(values, *step.args[1:], **step.kwargs)


def _first(step: Step) -> Any:
    return step.args[0] if step.args else None


def _with(step: Step, same: dict[Ref, Ref]) -> Step:
    def find(ref: Ref) -> Ref:
        return same.get(ref, ref)

    return (
        replace(step, args=replace_refs(step.args, find), kwargs=replace_refs(step.kwargs, find))
        if same
        else step
    )


def _between_writes(steps: list[Step]) -> list[list[Step]]:
    """Return `steps` in parts: each step that writes to a tensor is a part of its own."""
    parts: list[list[Step]] = [[]]
    for step in steps:
        if step.effect and _writes(step):
            parts += [[step], []]
        else:
            parts[-1].append(step)
    return parts


def _writes(step: Step) -> bool:
    """Return whether a step with an effect writes to a tensor that others may read. Steps on caches do not."""
    if step.leaf is not None or step.function in KEEP:
        return False
    return getattr(step.function, "__name__", "") != "expect"
