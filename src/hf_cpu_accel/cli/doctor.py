"""`hf-cpu-accel doctor`: check this machine for settings that make inference slow, and print a fix for each."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_cpu_accel.cli import checks, packages
from hf_cpu_accel.cli.checks import Check
from hf_cpu_accel.runtime import hardware, memory
from hf_cpu_accel.runtime.home_folder import home_folder

if TYPE_CHECKING:
    from rich.console import Console

_PACKAGES = ("hf_cpu_accel", "torch", "transformers", "sentence-transformers", "diffusers", "optimum")
_MARKS = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "problem": "[red]problem[/]"}


def doctor(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of a table.")
    ] = False,
    peaks: Annotated[
        bool, typer.Option("--peaks", help="Also measure peak FLOP/s and memory bandwidth.")
    ] = False,
) -> None:
    """Check this machine for problems that make accelerated models slow, and print a fix for each.

    The exit code is 1 if there are problems.
    """
    report = collect(peaks)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        from rich.console import Console

        _show(report, Console())
    if not report["ok"]:
        raise typer.Exit(1)


def collect(peaks: bool = False) -> dict[str, Any]:
    """Return the report as plain values: `ok`, `checks`, `versions`, `cpu` and `peaks` (None if not measured)."""
    try:
        cpu = hardware.detect()
    except ValueError as error:  # only if HF_CPU_ACCEL_ISA is not the name of a tier
        cap = Check("instruction tier", str(error), "problem", f"`unset {hardware.ISA_VARIABLE}`")
        return _report([cap], None, None)

    from hf_cpu_accel import extension
    from hf_cpu_accel.runtime import threads

    status = extension.status()
    results = [
        checks.kernels(status, cpu, extension.built_tiers()),
        checks.tier(cpu),
        checks.processor(cpu),
        checks.threads(threads.apply_threads(), cpu),
        checks.quota(cpu),
        checks.affinity(cpu),
        checks.caches(cpu),
        checks.memory(cpu, memory.memory_stall()),
        checks.numa(cpu),
        checks.huge_pages(cpu, os.environ),
        checks.allocator(memory.allocator(), memory.heap_status()),
        checks.bfloat16(hardware.native_bf16_is_fast()),
        checks.compiling(os.environ),
        checks.folder(home_folder()),
        checks.imports(packages.import_failures()),
    ]
    measured = hardware.measure_peaks() if peaks and status.loaded else None
    return _report(results, cpu, measured)


def versions() -> dict[str, str | None]:
    """Return the installed versions from the packages' metadata, without importing them; None for an absent package."""
    numbers: dict[str, str | None] = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            numbers[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            numbers[name] = None
    return numbers


def _report(
    results: list[Check], cpu: hardware.CPUInfo | None, measured: hardware.Peaks | None
) -> dict[str, Any]:
    return {
        "ok": all(check.status != "problem" for check in results),
        "checks": [asdict(check) for check in results],
        "versions": versions(),
        "cpu": None if cpu is None else {**asdict(cpu), "flags": sorted(cpu.flags)},
        "peaks": None if measured is None else asdict(measured),
    }


def _show(report: dict[str, Any], console: Console) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("", "check", "result"):
        table.add_column(heading, overflow="fold")
    for check in report["checks"]:
        text = escape(check["value"])
        if check["status"] == "note":
            text += f"\n[dim]{escape(check['fix'])}[/]"
        table.add_row(_MARKS[check["status"]], check["name"], text)
    numbers = ", ".join(f"{name} {number or 'not installed'}" for name, number in report["versions"].items())
    table.add_row("", "versions", numbers)
    if report["peaks"] is not None:
        table.add_row("", "peaks", _peaks_text(report["peaks"]))
    console.print(table)
    console.print()
    problems = [check for check in report["checks"] if check["status"] == "problem"]
    for check in problems:
        console.print(f"[red]{check['name']}[/]: {escape(check['value'])}")
        console.print(f"  [bold]Fix:[/] {escape(check['fix'])}")
    if not problems:
        console.print("[green]No problems found.[/]")


def _peaks_text(peaks: dict[str, float]) -> str:
    return (
        f"on {peaks['threads']} threads: float32 {peaks['float32']:.0f} GFLOP/s, "
        f"bfloat16 {peaks['bfloat16']:.0f} GFLOP/s, int8 {peaks['int8']:.0f} GOP/s, "
        f"reads {peaks['read_bandwidth']:.1f} GB/s"
    )
