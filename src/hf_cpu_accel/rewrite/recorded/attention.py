"""Attention that a layer writes out, in steps: products of queries and keys, what is done to these scores, softmax, and values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_cpu_accel.ops.attention import attention
from hf_cpu_accel.rewrite.core.trace import BMM, MATMUL, SOFTMAX
from hf_cpu_accel.rewrite.recorded.program import Ref, Step, size_of

_PRODUCT = frozenset((*MATMUL, *BMM))
_TIMES = frozenset((torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__))
_OVER = frozenset((torch.div, Tensor.div, Tensor.__truediv__))
_PLUS = frozenset((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__))
_FILL = frozenset((Tensor.masked_fill, torch.masked_fill))
_CAST = frozenset((Tensor.to, Tensor.float, Tensor.type_as, Tensor.contiguous))
_VIEW = frozenset((Tensor.view, Tensor.reshape))
# What is filled in where keys are hidden is added here: from here on that is the same, also where all are hidden.
_HIDDEN = -1e8


def join_attention(steps: list[Step], output_reads: Counter[Ref]) -> list[Step]:
    """`steps` with one in the place of each attention in them.

    Args:
        output_reads: of the refs that are returned.
    """
    steps = _with_sizes_of_operands(steps)
    for softmax in [step for step in steps if step.function in SOFTMAX]:
        found = _Written.of(softmax, steps, output_reads)
        if found is not None:
            joined = replace(found.values, function=found.call(), args=found.args, kwargs={}, leaf=None)
            gone = {id(step) for step in found.inner}
            steps = [joined if step is found.values else step for step in steps if id(step) not in gone]
    return steps


def _with_sizes_of_operands(steps: list[Step]) -> list[Step]:
    """`steps` in which nobody reads the sizes of scores, but those of what they are made of."""
    made = {step.result: step for step in steps}
    dims: dict[Ref, int] = {}
    for step in steps:
        if step.function is size_of:
            dims[step.args[0]] = max(dims.get(step.args[0], 0), step.args[1])

    def operand(owner: Ref, dim: int) -> tuple[Ref, int]:
        step, last = made.get(owner), dims[owner]
        while step is not None and not step.effect:
            if step.function in _PRODUCT and len(step.args) == 2:
                return (step.args[1] if dim == last else step.args[0]), dim
            if step.function not in SOFTMAX and step.function not in _CAST:
                break
            owner = step.args[0]
            step = made.get(owner)
        return owner, dim

    return [replace(s, args=operand(*s.args)) if s.function is size_of else s for s in steps]


@dataclass
class _Written:
    """
    Attributes:
        scores, values: the two products.
        inner: the steps between them, and the first.
        scale: of the products of queries and keys.
        biases: (what is added to scores, its factor, what it fills in where it is true or None), in their order.
        heads: into how many the batch of the scores is divided while they are added, or None.
    """

    scores: Step
    values: Step
    inner: list[Step]
    scale: float = 1.0
    biases: list[tuple[Ref, float, float | None]] = field(default_factory=list)
    heads: Any = None

    @classmethod
    def of(cls, softmax: Step, steps: Sequence[Step], output_reads: Counter[Ref]) -> _Written | None:
        made = {step.result: step for step in steps}
        readers: dict[Ref, list[Step]] = {}
        for step in steps:
            for ref in step.reads:
                readers.setdefault(ref, []).append(step)
        if _dim(softmax) not in (-1, 3):
            return None
        above = _above(softmax, made, readers, output_reads)
        below = _below(softmax, readers, output_reads)
        if above is None or below is None:
            return None
        found = cls(above[-1], below[-1], [softmax, *above, *below[:-1]])
        return found if all(found._take(step) for step in reversed(above[:-1])) else None

    @property
    def args(self) -> tuple[Any, ...]:
        query, key = self.scores.args
        return (query, key, self.values.args[1], *(bias for bias, _, _ in self.biases))

    def call(self) -> _Attention:
        return _Attention(self.scale, tuple(bias[1:] for bias in self.biases), self.heads)

    def _take(self, step: Step) -> bool:
        """Note what a step does to scores; False if that is none of what attention can do."""
        first, *rest = step.args
        number = rest[0] if len(rest) == 1 and not step.kwargs else None
        if step.function in _CAST:
            return True
        if step.function in _TIMES and isinstance(number, int | float):
            return self._scaled(number)
        if step.function in _OVER and isinstance(number, int | float):
            return self._scaled(1 / number)
        if step.function in _PLUS and isinstance(number, Ref):
            # Either may be the scores.
            bias = number if isinstance(first, Ref) and first in self._results else first
            self.biases.append((bias, 1.0, None))
            return isinstance(bias, Ref)
        if (
            step.function in _FILL
            and len(rest) == 2
            and isinstance(rest[0], Ref)
            and isinstance(rest[1], int | float)
            and rest[1] <= _HIDDEN
        ):
            self.biases.append((rest[0], 1.0, float(rest[1])))
            return True
        if step.function in _VIEW:
            return self._viewed(rest[0] if len(rest) == 1 else tuple(rest))
        return False

    @property
    def _results(self) -> set[Ref]:
        return {step.result for step in self.inner}

    def _scaled(self, factor: float) -> bool:
        self.scale *= factor
        self.biases = [(bias, by * factor, fill) for bias, by, fill in self.biases]
        return all(fill is None for _, _, fill in self.biases) and math.isfinite(factor)

    def _viewed(self, shape: Any) -> bool:
        """From [B * heads, L, keys] to [B, heads, L, keys], and back."""
        if not isinstance(shape, tuple):
            return False
        if len(shape) == 4 and self.heads is None and not self.biases and type(shape[1]) is int:
            self.heads = shape[1]
            return True
        return len(shape) == 3 and self.heads is not None


class _Attention:
    """softmax(scale * query key + biases) values, in the shapes in which that was written.

    Args:
        scale: of the scores.
        biases: (factor, what is filled in or None) of each that is given.
        heads: see `_Written`.
    """

    __name__ = "attention"

    def __init__(
        self, scale: float, biases: tuple[tuple[float, float | None], ...], heads: int | None
    ) -> None:
        self.scale, self.biases, self.heads = scale, biases, heads

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *biases: Tensor) -> Tensor:
        """query [..., L, D], key [..., D, keys], value [..., keys, E] -> [..., L, E]."""
        bias = self._bias(biases, query.dtype)
        shape = query.shape[:-1]
        heads = [self._divided(part) for part in (query, key.mT, value)]
        if any(part.dim() != 4 for part in heads) or len({part.shape[:2] for part in heads}) > 1:
            return self._written(query, key, value, bias)
        if bias is not None and (bias.dim() > 4 or (bias.dim() == 4 and query.dim() > 4)):
            return self._written(query, key, value, bias)
        if bias is not None:
            if bias.dim() == 3 and query.dim() == 3 and self.heads is None:
                bias = bias.unsqueeze(1)
            bias = bias[(None,) * (4 - bias.dim())]
        output = attention(*heads, mask=bias, scale=self.scale).transpose(1, 2)
        return output if output.shape[:-1] == shape else output.reshape(*shape, -1)

    def _divided(self, part: Tensor) -> Tensor:
        """[B, heads, L, D]."""
        if part.dim() == 3:
            return part.unsqueeze(1) if self.heads is None else part.unflatten(0, (-1, self.heads))
        return part.flatten(0, part.dim() - 4) if part.dim() > 4 else part

    def _bias(self, biases: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor | None:
        total: Tensor | None = None
        for bias, (factor, fill) in zip(biases, self.biases, strict=True):
            if fill is not None:
                part = torch.zeros_like(bias, dtype=dtype).masked_fill_(bias.bool(), fill)
            else:
                part = bias.to(dtype) if factor == 1 else bias.to(dtype) * factor
            total = part if total is None else total + part
        return total

    def _written(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        scores = torch.matmul(query, key) * self.scale
        if self.heads is not None and bias is not None:
            scores = (scores.unflatten(0, (-1, self.heads)) + bias).flatten(0, 1)
        elif bias is not None:
            scores = scores + bias
        return torch.matmul(functional.softmax(scores, -1).to(value.dtype), value)


def _above(
    softmax: Step, made: dict[Ref, Step], readers: dict[Ref, list[Step]], output_reads: Counter[Ref]
) -> list[Step] | None:
    """The steps that made the scores, the last first, down to their product."""
    found: list[Step] = []
    ref = softmax.args[0]
    while True:
        step = made.get(ref)
        if step is None or step.effect or len(readers[ref]) != 1 or output_reads[ref]:
            return None
        found.append(step)
        if step.function in _PRODUCT:
            return found if len(step.args) == 2 and not step.kwargs else None
        follow = _follows(step, made)
        if follow is None:
            return None
        ref = follow


def _follows(step: Step, made: dict[Ref, Step]) -> Ref | None:
    """Which argument of a step is the scores."""
    if not step.args or not isinstance(step.args[0], Ref):
        return None
    if step.function in _PLUS and len(step.args) == 2 and isinstance(step.args[1], Ref):
        for arg in step.args:
            if _is_of_scores(arg, made):
                return arg
        return None
    known = step.function in _CAST or step.function in _TIMES or step.function in _OVER
    return step.args[0] if known or step.function in _FILL or step.function in _VIEW else None


def _is_of_scores(ref: Ref, made: dict[Ref, Step]) -> bool:
    step = made.get(ref)
    while step is not None and step.function not in _PRODUCT:
        if not step.args or not isinstance(step.args[0], Ref):
            return False
        known = _CAST | _TIMES | _OVER | _FILL | _VIEW | _PLUS
        step = made.get(step.args[0]) if step.function in known else None
    return step is not None


def _below(softmax: Step, readers: dict[Ref, list[Step]], output_reads: Counter[Ref]) -> list[Step] | None:
    """The steps from the weights to their product with values."""
    found: list[Step] = []
    ref = softmax.result
    while True:
        steps = readers.get(ref, [])
        if len(steps) != 1 or output_reads[ref] or not steps[0].args or steps[0].args[0] != ref:
            return None
        found.append(steps[0])
        if steps[0].function in _PRODUCT:
            return found if len(steps[0].args) == 2 and not steps[0].kwargs else None
        if steps[0].function not in _CAST | _VIEW or steps[0].effect:
            return None
        ref = steps[0].result


def _dim(softmax: Step) -> Any:
    return softmax.kwargs.get("dim", softmax.args[1] if len(softmax.args) > 1 else None)
