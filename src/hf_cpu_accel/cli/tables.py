"""The style of result tables, and the format of times and ratios in them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from hf_cpu_accel.measure import Estimate


def wide_console() -> Console:
    """Return a console that does not cut tables to 80 columns when it writes to a file or a pipe."""
    return Console(width=None if sys.stdout.isatty() else 140)


def results_table(headings: Sequence[str], title: str | None = None, caption: str | None = None) -> Table:
    """Return an empty table: first column aligned left, the others right, no wrapping."""
    out = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    out.title_justify = out.caption_justify = "left"
    out.padding = (0, 1, 0, 0)
    for number, heading in enumerate(headings):
        out.add_column(heading, justify="right" if number else "left", no_wrap=True)
    return out


def milliseconds(seconds: float) -> str:
    """Format seconds as milliseconds with up to three significant digits."""
    value = seconds * 1e3
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def interval(seconds: Estimate) -> str:
    """Format both ends of an interval in milliseconds."""
    return f"{milliseconds(seconds.low)}..{milliseconds(seconds.high)}"


def ratio_text(ratio: float | None) -> str:
    """Format a speedup as `1.25x`, one below 1 as `0.80x slower` (pasted tables lose their colors), None as `-`."""
    if ratio is None:
        return "-"
    return f"{ratio:.2f}x" + (" slower" if ratio < 1 else "")


def colored_ratio(ratio: float) -> str:
    """Return `ratio_text` in rich markup: red below 1, else green."""
    color = "red" if ratio < 1 else "green"
    return f"[{color}]{ratio_text(ratio)}[/{color}]"
