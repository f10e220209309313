"""The function that Dynamo calls: it passes the used inputs, and tensors derived from parameters, to the compiled graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hf_cpu_accel.compiler.weight_transforms import Derived, Recipe, derive
from hf_cpu_accel.guard.values import Fingerprint


@dataclass(frozen=True)
class Request:
    """A recipe, and the positions of its sources in the inputs of Dynamo's graph."""

    recipe: Recipe
    positions: tuple[int, ...]


@dataclass(frozen=True)
class _State:
    """The parameters of the last call, and the tensors derived from them."""

    sources: Fingerprint
    derived: list[Derived]
    tensors: list[Tensor]


class Bound:
    """Calls `compiled` with the inputs that it uses and the derived tensors.

    Each call compares the parameters with those of the previous call (see `guard.values.Fingerprint`). A weight that was
    replaced, loaded or trained is packed again.

    Args:
        compiled: a function of the inputs at `kept`, followed by all tensors of the requests in order.
        kept: positions in Dynamo's inputs.
        requests: the tensors to derive.
    """

    def __init__(
        self, compiled: Callable[..., Any], kept: Sequence[int], requests: Sequence[Request]
    ) -> None:
        self._compiled = compiled
        self._kept = list(kept)
        self._requests = list(requests)
        self._watched = sorted({position for request in requests for position in request.positions})
        self._state: _State | None = None

    def __call__(self, *inputs: Any) -> Any:
        sources = [inputs[position] for position in self._watched]
        state = self._state
        if state is None or not state.sources.matches(sources):
            state = self._state = self._derive(inputs, sources)
        return self._compiled(*[inputs[position] for position in self._kept], *state.tensors)

    def _derive(self, inputs: Sequence[Any], sources: list[Tensor]) -> _State:
        fingerprint = Fingerprint(
            sources
        )  # first, so that the next call notices writes that happen meanwhile
        derived = [derive(r.recipe, [inputs[position] for position in r.positions]) for r in self._requests]
        return _State(fingerprint, derived, [tensor for one in derived for tensor in one.tensors])
