"""How a matcher says no: it returns a `Refusal`, whose reason `explain()` prints where one would expect a fusion."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import nn

from hf_cpu_accel.plan import PlanItem

T = TypeVar("T")

_FFN = "nested ffn"  # a part of a layer
RECORDED = "recorded layer"  # the parts of which have rows of their own
# The structures of rows that stand for all modules below them.
LAYERS = frozenset(
    {
        "encoder layer",
        "window encoder layer",
        "grid encoder layer",
        "decoder layer",
        _FFN,
        "residual blocks",
        "convolution block",
        "recurrent mixer",
        "recurrent layer",
        RECORDED,
        "latent attention",
        "latent layer",
        "cached attention",
        "cached layer",
    }
)


@dataclass(frozen=True)
class Refusal:
    """Why a part is left as it is.

    Attributes:
        reason: the obstacle, in words that go on after "left because".
        yields: whether it is that the part is of another kind: a matcher of that kind has more to say.
    """

    reason: str
    yields: bool = False


class Refused(Exception):
    """Ends a reading from deep inside of it; `attempt` makes it the refusal that it carries."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.reason)
        self.refusal = refusal


def required(value: T | Refusal) -> T:
    """`value`, if it is no refusal.

    Raises:
        Refused: it is one.
    """
    if isinstance(value, Refusal):
        raise Refused(value)
    return value


@dataclass(frozen=True)
class RefusedPart:
    """What a fuser refused where a fusion would have been expected: `structure` is what it looked for."""

    path: str
    structure: str
    refusal: Refusal


def refusal_items(refused: Sequence[RefusedPart], items: Sequence[PlanItem]) -> Iterator[PlanItem]:
    """The rows of `explain()` for what was refused; of several refusals of one part, the first that does not yield.

    Args:
        items: the rows that are there: what is fused, holds a fused part or is in one needs no other.
    """
    told = {item.name for item in items if item.structure in LAYERS}
    fused = [item.name for item in items if item.structure in LAYERS and item.reason is None]
    layers = [item.name for item in items if item.structure in LAYERS - {_FFN} and item.reason is None]
    sorted_out = sorted(refused, key=lambda part: part.refusal.yields)
    for path, part in {part.path: part for part in reversed(sorted_out)}.items():
        if path in told or any(_is_within(path, other) for other in fused):
            continue
        if part.structure != _FFN and any(_is_within(other, path) for other in layers):
            continue
        yield PlanItem.left(path, part.structure, part.refusal.reason)


def is_listed(root: nn.Module, path: str) -> bool:
    """Whether that is a member of a list of modules."""
    above, _, name = path.rpartition(".")
    return name.isdigit() and isinstance(root.get_submodule(above), nn.ModuleList | nn.Sequential)


def _is_within(path: str, other: str) -> bool:
    return path == other or path.startswith(f"{other}.")
