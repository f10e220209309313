"""The look that result tables share, and how times and ratios are written in them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from hf_cpu_accel.measure import Estimate


def wide_console() -> Console:
    """A console that does not cut a table to 80 columns where it writes to a file or a pipe."""
    return Console(width=None if sys.stdout.isatty() else 140)


def results_table(headings: Sequence[str], title: str | None = None, caption: str | None = None) -> Table:
    """An empty table: names on the left, numbers to the right, nothing wrapped."""
    out = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    out.title_justify = out.caption_justify = "left"
    out.padding = (0, 1, 0, 0)
    for number, heading in enumerate(headings):
        out.add_column(heading, justify="right" if number else "left", no_wrap=True)
    return out


def milliseconds(seconds: float) -> str:
    """Three significant digits, which is more than the machine's noise allows to read."""
    value = seconds * 1e3
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def interval(seconds: Estimate) -> str:
    """Both ends of an interval in milliseconds."""
    return f"{milliseconds(seconds.low)}..{milliseconds(seconds.high)}"


def ratio_text(ratio: float | None) -> str:
    """`1.25x`; "slower" in words where it is below one, since color is lost in a pasted table; `-` if unknown."""
    if ratio is None:
        return "-"
    return f"{ratio:.2f}x" + (" slower" if ratio < 1 else "")


def colored_ratio(ratio: float) -> str:
    """`ratio_text` in rich's markup, green or red."""
    color = "red" if ratio < 1 else "green"
    return f"[{color}]{ratio_text(ratio)}[/{color}]"
