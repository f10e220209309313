"""The file that `hf-cpu-accel bench --submit` writes: what others need to read these numbers, for attaching to an issue."""

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

# Of what `doctor` finds; the rest is about this installation: folders, memory in use.
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
    """Where the file goes, in the working folder: named for the CPU and the model."""
    words = f"{cpu} {workload['model']}".replace("(R)", "").replace("(TM)", "")
    return Path(f"hf-cpu-accel-{re.sub(r'[^A-Za-z0-9.]+', '-', words).strip('-').lower()}.md")


def write(
    path: Path,
    table: Table,
    results: Sequence[Any],
    context: dict[str, object],
    report: dict[str, Any],
) -> None:
    """Markdown: the machine, the table as the terminal shows it, and everything as JSON.

    Args:
        context: as `report.document` takes it.
        report: of `doctor.collect`.
    """
    found = {check["name"]: check["value"] for check in report["checks"]}
    versions = ", ".join(f"{name} {number}" for name, number in report["versions"].items() if number)
    rows = [(name, found[name]) for name in _CHECKS if name in found]
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
    """Instruction sets of the CPU, and nothing else that it says of itself."""
    kinds = re.compile(r"avx|amx|fma|f16c|sse4|asimd|neon|sve|sme|bf16|i8mm|fphp")
    return [flag for flag in (report["cpu"] or {}).get("flags", ()) if kinds.match(flag)]
