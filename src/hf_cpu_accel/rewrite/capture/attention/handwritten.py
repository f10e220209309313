"""Match attention that a layer writes out in steps: products of queries and keys, ops on these scores, softmax, and products
with values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from typing import Any

from hf_cpu_accel.rewrite.capture.attention.attention_step import Attention, Bias
from hf_cpu_accel.rewrite.capture.normal_forms import (
    CAST,
    FILL,
    MINUS,
    OVER,
    PLUS,
    PRODUCT,
    TANH,
    TIMES,
    VIEW,
    is_without_sink,
    scores_in,
    with_sink,
)
from hf_cpu_accel.rewrite.capture.program import Ref, Step
from hf_cpu_accel.rewrite.core.trace import SOFTMAX

# Fills of hidden keys become biases here. From _HIDDEN on that is equal if other keys are visible; if all are
# hidden, _LOWEST removes the scores completely.
_HIDDEN, _LOWEST = -1e8, -1e30


def join_attention(steps: list[Step], output_reads: Counter[Ref]) -> list[Step]:
    """Return `steps` with one step in place of each attention in them.

    Args:
        output_reads: reads of the refs that are returned.
    """
    for softmax in [step for step in steps if step.function in SOFTMAX]:
        found = _Written.of(softmax, steps, output_reads)
        if found is not None:
            joined = replace(found.values, function=found.call, args=found.args, kwargs={}, leaf=None)
            gone = {id(step) for step in found.inner}
            steps = [joined if step is found.values else step for step in steps if id(step) not in gone]
            place = steps.index(joined) + 1
            told = [step.result for step in found.inner if output_reads[step.result]]
            weights = [replace(joined, function=found.call.weights, result=ref) for ref in told]
            steps = [*steps[:place], *weights, *steps[place:]]
    return steps


@dataclass
class _Written:
    """Attention in steps.

    Attributes:
        scores, values: the two products.
        inner: the steps between them, and the first.
        scale: of the products of queries and keys, up to `capped` if that is set, and from there on.
        capped: their scale at the tanh.
        factors: tensors that multiply the scores, with one number for all keys.
        biases: the biases of scores, and how each is added, in their order.
        heads: the number of heads into which the batch of the scores is divided while biases are added, or None.
        sink: a score of each query for no key, or None.
    """

    scores: Step
    values: Step
    inner: list[Step]
    scale: float = 1.0
    factors: list[Ref] = field(default_factory=list)
    biases: list[tuple[Ref, Bias]] = field(default_factory=list)
    heads: Any = None
    capped: float | None = None
    sink: Ref | None = None
    _in_windows: bool = False

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
        if not all(found._take(step) for step in reversed(above[:-1])):
            return None
        if sum(map(is_without_sink, below)) != (found.sink is not None):
            return None
        if found.capped is not None and not found.scale > 0:
            return None
        found._lower_fills()
        return found if all(found._zero(step.args[1]) for step in below if step.function in FILL) else None

    @property
    def args(self) -> tuple[Any, ...]:
        query, key = self.scores.args
        sink = () if self.sink is None else (self.sink,)
        return (query, key, self.values.args[1], *self.factors, *(ref for ref, _ in self.biases), *sink)

    @cached_property
    def call(self) -> Attention:
        biases = tuple(bias for _, bias in self.biases)
        scale, softcap = self.scale, None
        if self.capped is not None:  # scale * tanh(capped * score)
            scale, softcap = self.scale * self.capped, self.scale
        return Attention(
            scale, len(self.factors), biases, self.heads, has_sink=self.sink is not None, softcap=softcap
        )

    def _take(self, step: Step) -> bool:
        """Record the effect of a step on scores; return False if attention does not support it."""
        first, *rest = step.args
        other = rest[0] if len(rest) == 1 and not step.kwargs else None
        if step.function in CAST:
            return True
        if self.sink is not None:  # which is no score of a key
            return False
        if (joined := with_sink(step)) is not None:
            self.sink = joined[1]
            return self.heads is None and not self._in_windows
        if step.function in TANH:
            if self.capped is not None or self.biases:
                return False
            self.capped, self.scale = self.scale, 1.0
            return True
        if step.function in TIMES or step.function in OVER:
            return self._scaled(other, is_over=step.function in OVER)
        if step.function in PLUS or step.function in MINUS:
            return self._added(first, other, -1.0 if step.function in MINUS else 1.0)
        if (
            step.function in FILL
            and len(rest) == 2
            and isinstance(rest[1], int | float)
            and rest[1] <= _HIDDEN
        ):
            self.biases.append((rest[0], Bias(1.0, float(rest[1]), self._in_windows)))
            return isinstance(rest[0], Ref)
        return step.function in VIEW and self._viewed(rest[0] if len(rest) == 1 else tuple(rest))

    def _added(self, first: Any, other: Any, factor: float) -> bool:
        if not isinstance(other, Ref) or not isinstance(first, Ref):
            return isinstance(other, int | float) and other == 0
        bias = other if first in self._results else first  # either may be the scores
        self.biases.append((bias, Bias(factor, None, self._in_windows)))
        return True

    def _lower_fills(self) -> None:
        """Lower fills after which nothing is added, so that rows without any key attend to all equally."""
        last = [
            bias.fill for _, bias in takewhile(lambda part: part[1].fill is not None, reversed(self.biases))
        ]
        if len(set(last)) == 1:
            for place in range(len(self.biases) - len(last), len(self.biases)):
                ref, bias = self.biases[place]
                self.biases[place] = ref, replace(bias, fill=min(last[0], _LOWEST))  # type: ignore[type-var]

    def _zero(self, hidden: Any) -> bool:
        """Give zeros to rows without any key, if hidden weights are set to 0 after the softmax."""
        found = [ref == hidden and bias.fill is not None for ref, bias in self.biases]
        self.biases = [
            (ref, replace(bias, fill=-math.inf) if zero else bias)
            for (ref, bias), zero in zip(self.biases, found, strict=True)
        ]
        return any(found)

    @property
    def _results(self) -> set[Ref]:
        return {step.result for step in self.inner}

    def _scaled(self, factor: Any, *, is_over: bool) -> bool:
        if isinstance(factor, Ref):
            self.factors.append(factor)
            is_alone = not self.biases and self.heads is None and not self._in_windows and self.capped is None
            return is_alone and not is_over and factor not in self._results
        if not isinstance(factor, int | float) or not factor:
            return False
        factor = 1 / factor if is_over else factor
        self.scale *= factor
        self.biases = [(ref, replace(bias, factor=bias.factor * factor)) for ref, bias in self.biases]
        return all(bias.fill is None for _, bias in self.biases) and math.isfinite(factor)

    def _viewed(self, shape: Any) -> bool:
        """Record a view from [B * heads, L, keys] to [B, heads, L, keys] and back, or from [B * windows, heads, L, keys] to five
        dimensions and back."""
        if not isinstance(shape, tuple):
            return False
        if len(shape) == 5 and not self._in_windows and self.heads is None:
            self._in_windows = True
            return True
        if len(shape) == 4 and self._in_windows:
            self._in_windows = False
            return True
        if len(shape) == 4 and self.heads is None and not self.biases and type(shape[1]) is int:
            self.heads = shape[1]
            return True
        return len(shape) == 3 and self.heads is not None


def _above(
    softmax: Step, made: dict[Ref, Step], readers: dict[Ref, list[Step]], output_reads: Counter[Ref]
) -> list[Step] | None:
    """Return the steps that compute the scores, the last first, down to their product, or None."""
    found: list[Step] = []
    ref = softmax.args[0]
    while True:
        step = made.get(ref)
        if step is None or step.effect or len(readers[ref]) != 1 or output_reads[ref]:
            return None
        found.append(step)
        if step.function in PRODUCT:
            return found if len(step.args) == 2 and not step.kwargs else None
        follow = scores_in(step, made)
        if follow is None:
            return None
        ref = follow


def _below(softmax: Step, readers: dict[Ref, list[Step]], output_reads: Counter[Ref]) -> list[Step] | None:
    """Return the steps from the weights to their product with values, or None."""
    found: list[Step] = []
    ref = softmax.result
    while True:
        steps = readers.get(ref, [])
        if len(steps) != 1 or not steps[0].args or steps[0].args[0] != ref:
            return None
        if output_reads[ref] and any(step.function not in CAST for step in found):
            return None
        found.append(steps[0])
        if steps[0].function in PRODUCT:
            return found if len(steps[0].args) == 2 and not steps[0].kwargs else None
        step = steps[0]
        if step.effect or not (
            step.function in CAST | VIEW or _is_filled_with_zeros(step) or is_without_sink(step)
        ):
            return None
        ref = steps[0].result


def _is_filled_with_zeros(step: Step) -> bool:
    return step.function in FILL and len(step.args) == 3 and not step.kwargs and step.args[2] == 0


def _dim(softmax: Step) -> Any:
    return softmax.kwargs.get("dim", softmax.args[1] if len(softmax.args) > 1 else None)
