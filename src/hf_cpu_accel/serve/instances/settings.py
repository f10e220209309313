"""What was set for instances, to which value and why: the rows of the tables that `launch` and `InstancePool` print."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Setting:
    """One row."""

    name: str
    value: str
    why: str


def table(settings: Iterable[Setting]) -> Table:
    """For rich."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    out = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in ("what", "set to", "why"):
        out.add_column(heading, overflow="fold")
    for setting in settings:
        out.add_row(*(escape(text) for text in (setting.name, setting.value, setting.why)))
    return out
