"""Reasons why a matcher does not match: it returns a `Refusal`, which `explain()` prints where a fusion would be expected."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import nn

from hf_cpu_accel.plan import PlanItem, Structure

T = TypeVar("T")

RECORDED = Structure("recorded layer")  # whose parts have their own rows


@dataclass(frozen=True)
class Refusal:
    """The reason why a part is not replaced.

    Attributes:
        reason: the text of the column "left because" of the plan.
        yields: whether the part is of another kind, so that the reason of another matcher comes first.
    """

    reason: str
    yields: bool = False


class Refused(Exception):
    """Raised deep inside a matcher; `attempt` returns the refusal that it carries."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.reason)
        self.refusal = refusal


def required(value: T | Refusal) -> T:
    """Return `value` if it is not a refusal.

    Raises:
        Refused: it is one.
    """
    if isinstance(value, Refusal):
        raise Refused(value)
    return value


@dataclass(frozen=True)
class RefusedPart:
    """A part that was not fused where a fusion would be expected.

    Attributes:
        item: its row in the plan, with the structure of the matcher.
        yields: see `Refusal`.
    """

    item: PlanItem
    yields: bool


def refusal_items(refused: Sequence[RefusedPart], items: Sequence[PlanItem]) -> Iterator[PlanItem]:
    """Yield the rows of `explain()` for refused parts; of several refusals of one part, the first that does not yield.

    Args:
        items: the rows so far. A part that is fused, contains a fused part or is inside one needs no other row.
    """
    told = {item.name for item in items if item.scope is not None}
    fused = [item for item in items if item.scope is not None and item.reason is None]
    layers = [item for item in fused if item.scope != "part"]
    sorted_out = sorted(refused, key=lambda part: part.yields)
    for path, item in {part.item.name: part.item for part in reversed(sorted_out)}.items():
        if path in told or any(_is_within(path, other.name) for other in fused):
            continue
        if item.scope != "part" and any(_is_within(other.name, path) for other in layers):
            continue
        yield item


def is_listed(root: nn.Module, path: str) -> bool:
    """Return whether the module at `path` is a member of a list of modules."""
    above, _, name = path.rpartition(".")
    return name.isdigit() and isinstance(root.get_submodule(above), nn.ModuleList | nn.Sequential)


def _is_within(path: str, other: str) -> bool:
    return path == other or path.startswith(f"{other}.")
