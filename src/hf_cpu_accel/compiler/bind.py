"""The function that Dynamo calls: it passes the used inputs, and tensors derived from parameters, to the compiled graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

from torch import Tensor

from hf_cpu_accel.compiler.weight_transforms import Derived, Fingerprint, Recipe, derive


@dataclass(frozen=True)
class Request:
    """A recipe, and the positions of its sources in the inputs of Dynamo's graph."""

    recipe: Recipe
    positions: tuple[int, ...]


@dataclass(frozen=True)
class _State:
    """The parameters of the last call, and the tensors derived from them."""

    sources: list[Tensor]
    fingerprint: Fingerprint
    derived: list[Derived]
    tensors: list[Tensor]


class Bound:
    """Calls `compiled` with the inputs that it uses and the derived tensors.

    Each call compares the parameters with those of the previous call (see `weight_transforms.Fingerprint`). A weight that was
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
        if state is None or not _unchanged(state, sources):
            state = self._state = self._derive(inputs, sources)
        return self._compiled(*[inputs[position] for position in self._kept], *state.tensors)

    def _derive(self, inputs: Sequence[Any], sources: list[Tensor]) -> _State:
        fingerprint = Fingerprint(
            sources
        )  # first, so that the next call notices writes that happen meanwhile
        derived = [derive(r.recipe, [inputs[position] for position in r.positions]) for r in self._requests]
        return _State(sources, fingerprint, derived, [tensor for one in derived for tensor in one.tensors])


def _unchanged(state: _State, sources: list[Tensor]) -> bool:
    return all(map(is_, state.sources, sources)) and state.fingerprint.matches(sources)
