"""Mappings of keys and values that layers pass to later ones (`KVSharingDict` of transformers), as arguments of recorded layers.

A layer that shares stores its keys and values there; a later one attends to these, and has none of its own. The tensors are not
written to.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor

from hf_cpu_accel.hosts.loaded import loaded
from hf_cpu_accel.rewrite.capture.size import StandIn
from hf_cpu_accel.rewrite.capture.stand_in import WRITE_TO_CACHE, Asked, refuse


def is_shared(value: Any) -> bool:
    return type(value) in loaded("transformers.cache_utils", "KVSharingDict")


def form_of_shared(shared: Any) -> tuple[tuple[Any, ...], list[int]]:
    """Return the form of the mapping, and the sizes of all tensors.

    Raises:
        TypeError: it holds other values than tuples of tensors by name.
    """
    form: list[Any] = [type(shared)]
    sizes: list[int] = []
    for name, states in shared.data.items():
        if (
            type(name) is not str
            or type(states) is not tuple
            or not all(isinstance(x, Tensor) for x in states)
        ):
            raise TypeError(
                f"layers that use {type(shared).__name__}[{name!r}] other than as a tuple of tensors are not recorded"
            )
        form.append((name, *((x.dtype, x.dim()) for x in states)))
        sizes.extend(size for x in states for size in x.shape)
    return tuple(form), sizes


def shared_contents(shared: Any) -> list[Any]:
    """Return the names and tensors of the mapping."""
    return [(name, *states) for name, states in shared.data.items()]


class SharedStandIn(StandIn):
    """Stand-in for the mapping; any attribute that is not defined here is refused."""

    def __init__(self, real: Any, notes: Asked) -> None:
        self.real, self._notes = real, notes

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self.real)

    def __getattr__(self, name: str) -> NoReturn:
        refuse(f"it uses {name} of the shared keys and values, which is not recorded")

    def __getitem__(self, name: Any) -> Any:
        return self._notes.called(states_of, (self, name), {}, effect=False)

    def __setitem__(self, name: Any, states: Any) -> None:
        self._notes.called(share, (self, name, states), {}, effect=True)

    def __contains__(self, name: Any) -> bool:
        is_there: bool = self._notes.number(has_states, (self, name))
        return is_there

    def __iter__(self) -> NoReturn:
        self.__getattr__("iter")

    def __len__(self) -> int:
        self.__getattr__("len")


def states_of(shared: Any, name: str) -> Any:
    return shared[name]


def has_states(shared: Any, name: str) -> bool:
    return name in shared


def share(shared: Any, name: str, states: tuple[Tensor, ...]) -> None:
    shared[name] = states


# They keep tensors for other calls or layers, and write to none.
KEEP = WRITE_TO_CACHE | {share}
