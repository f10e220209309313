"""Tables of text generation, one per model, for the terminal and for the recorded results."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from benchmarks.generation.harness import Record
from benchmarks.report import note
from hf_cpu_accel.cli.bench.generation_report import rate, share
from hf_cpu_accel.cli.tables import milliseconds, ratio_text, results_table

__all__ = ["HEADINGS", "cells", "note", "table"]

_ERROR_WIDTH = 120  # the whole of it is in the JSON lines and in the log
HEADINGS = (
    "system",
    "prefill\ntok/s",
    "of\npeak",
    "prefill\nspeedup",
    "decode\ntok/s",
    "of\nmemory",
    "decode\nspeedup",
    "first\nms",
    "GB/s\naround",
)


def cells(record: Record) -> tuple[str, ...]:
    """Return one row: the numbers in the order of the headings, or the error."""
    if not record.runs:
        error = textwrap.shorten(str(record.error), _ERROR_WIDTH, placeholder=" ...")
        return (record.system, f"failed: {error}", *[""] * (len(HEADINGS) - 2))
    read = record.read_share
    around = [run.bandwidth for run in record.runs if run.bandwidth]
    return (
        record.system,
        rate(record.prompt / record.first.seconds.value),
        share(record.flops_share),
        ratio_text(record.first_speedup.value),
        rate(1 / record.step.seconds.value),
        share(None if read is None else read.value),
        ratio_text(record.step_speedup.value),
        milliseconds(record.first.seconds.value),
        f"{statistics.median(around) / 1e9:.0f}" if around else "-",
    )


def table(title: str, records: Sequence[Record]) -> Table:
    """Return the table for the terminal; failures are listed below the numbers."""
    failed = [record for record in records if not record.runs]
    failures = "\n".join(f"{record.system} {escape(cells(record)[1])}" for record in failed)
    out = results_table(HEADINGS, title, failures or None)
    for record in records:
        if record not in failed:
            out.add_row(*(escape(cell) for cell in cells(record)))
    return out
