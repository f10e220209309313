"""The file that `hf-cpu-accel bench --submit` writes for an issue: the results and the facts needed to interpret them."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hf_cpu_accel.cli.bench.report import document

# The checks of `doctor` that describe the machine. The other ones are about the installation: folders, memory in use.
_CHECKS = (
    "kernels",
    "instruction tier",
    "CPU",
    "threads",
    "CPU quota",
    "caches",
    "NUMA",
    "huge pages",
    "bfloat16",
)
_WIDTH = 100


def path_for(cpu: str, workload: Mapping[str, object]) -> Path:
    """Return the path of the file in the working folder, named after the CPU and the model."""
    words = f"{cpu} {workload['model']}".replace("(R)", "").replace("(TM)", "")
    return Path(f"hf-cpu-accel-{re.sub(r'[^A-Za-z0-9.]+', '-', words).strip('-').lower()}.md")


def write(
    path: Path,
    table: Table,
    results: Sequence[Any],
    context: dict[str, object],
    report: dict[str, Any],
) -> None:
    """Write Markdown: the machine, the table of the terminal, and all results as JSON.

    Args:
        path: the file.
        table: the table of the results.
        results: the results.
        context: machine, workload and settings, as for `report.document`.
        report: the report of `doctor.collect`.
    """
    values = {check["name"]: check["value"] for check in report["checks"]}
    versions = ", ".join(f"{name} {number}" for name, number in report["versions"].items() if number)
    rows = [(name, values[name]) for name in _CHECKS if name in values]
    rows += [("versions", versions), ("date", context["date"]), ("command", f"`{context['command']}`")]
    text = io.StringIO()
    Console(file=text, width=_WIDTH, color_system=None).print(table)
    lines = [
        f"# hf_cpu_accel on {context['cpu']}",
        "",
        "| | |",
        "| --- | --- |",
        *(f"| {name} | {str(value).replace('|', '/')} |" for name, value in rows),
        "",
        "```text",
        *(line.rstrip() for line in text.getvalue().splitlines()),
        "```",
        "",
        "<details><summary>Data</summary>",
        "",
        "```json",
        json.dumps(
            {**document(results, context), "flags": _flags(report), "peaks": report["peaks"]}, indent=1
        ),
        "```",
        "",
        "</details>",
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _flags(report: Mapping[str, Any]) -> list[str]:
    """Return the CPU flags that name instruction sets."""
    kinds = re.compile(r"avx|amx|fma|f16c|sse4|asimd|neon|sve|sme|bf16|i8mm|fphp")
    return [flag for flag in (report["cpu"] or {}).get("flags", ()) if kinds.match(flag)]
