"""The settings of instances with their reasons: the rows of the tables of `launch` and `InstancePool`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Setting:
    """One row of the table."""

    name: str
    value: str
    why: str


def table(settings: Iterable[Setting]) -> Table:
    """Return a rich table of the settings."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    out = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in ("setting", "value", "reason"):
        out.add_column(heading, overflow="fold")
    for setting in settings:
        out.add_row(*(escape(text) for text in (setting.name, setting.value, setting.why)))
    return out
