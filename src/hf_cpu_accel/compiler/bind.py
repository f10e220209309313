"""A compiled graph as Dynamo calls it: with the inputs that are still used, and with what was derived from parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

from torch import Tensor

from hf_cpu_accel.compiler.weight_transforms import Derived, Fingerprint, Recipe, derive


@dataclass(frozen=True)
class Request:
    """`recipe` for the inputs at `positions` of Dynamo's graph."""

    recipe: Recipe
    positions: tuple[int, ...]


@dataclass(frozen=True)
class _State:
    """The parameters of the last call, and what was made of them."""

    sources: list[Tensor]
    fingerprint: Fingerprint
    derived: list[Derived]
    tensors: list[Tensor]


class Bound:
    """Calls `compiled`.

    Each call compares the parameters with those of the call before (see `weight_transforms.Fingerprint`): a weight that was
    replaced, loaded or trained on is packed again.

    Args:
        compiled: takes the inputs at `kept`, then all tensors of the requests in order.
        kept: positions in Dynamo's inputs.
        requests: what to derive.
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
            state = self._state = self._renewed(inputs, sources)
        return self._compiled(*[inputs[position] for position in self._kept], *state.tensors)

    def _renewed(self, inputs: Sequence[Any], sources: list[Tensor]) -> _State:
        fingerprint = Fingerprint(sources)  # before: the next call notices what is written meanwhile
        derived = [derive(r.recipe, [inputs[position] for position in r.positions]) for r in self._requests]
        return _State(sources, fingerprint, derived, [tensor for one in derived for tensor in one.tensors])


def _unchanged(state: _State, sources: list[Tensor]) -> bool:
    return all(map(is_, state.sources, sources)) and state.fingerprint.matches(sources)
