"""The suites: `python -m benchmarks.suites [SUITE | SUITE.MODEL ...]`.

python -m benchmarks.suites timm torchbench.vgg16 --systems ours-fp32,ours-int8,compile-freeze-fp32
python -m benchmarks.suites --plot suites.svg --record benchmarks/results
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from tqdm import tqdm

from benchmarks import systems
from benchmarks.quiet import exclusive, group_priority
from benchmarks.session import Keep, Out, Priority, Session, Settings, Threads, chosen_systems
from benchmarks.suites import summary
from benchmarks.suites.cases import SUITES, Case
from hf_cpu_accel.cli.tables import results_table

_DEFAULT = "ours-fp32,ours-int8"
_MOST_SECONDS = 1500.0  # of one model: to compile one takes minutes where others are at work


def main(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="SUITE[.MODEL]", help=f"Of {', '.join(SUITES)}; all if none is named."),
    ] = None,
    chosen: Annotated[
        str, typer.Option("--systems", help=f"Any of {', '.join(systems.SYSTEMS)}.")
    ] = _DEFAULT,
    rounds: Annotated[int, typer.Option(min=1, help="Bursts of each system.")] = 3,
    seconds: Annotated[
        float, typer.Option(min=0, help="Minimum length of a burst, in seconds; at least two calls.")
    ] = 0.3,
    threads: Threads = None,
    priority: Priority = True,
    plot: Annotated[
        Path | None, typer.Option(help="SVG or PNG file for a chart of the geometric means.")
    ] = None,
    out: Out = None,
    record: Keep = None,
) -> None:
    """Measure the models of TorchInductor's dashboards: eager, torch.compile and this package, in turns."""
    wanted = [
        systems.BASE,
        *chosen_systems(chosen, [name for name in systems.SYSTEMS if name != systems.BASE]),
    ]
    cases = chosen_cases(names or list(SUITES))
    settings = Settings(rounds, seconds, 2, threads, priority)
    session = Session("benchmarks.suites", settings, out, record, "The suites of TorchInductor's dashboards")
    rows: list[summary.Row] = []
    for case in tqdm(cases, unit="model", disable=None):
        results = measured(case, wanted, settings)
        if isinstance(results, str):
            tqdm.write(f"{case.suite}.{case.name} failed: {results}")
            continue
        row = summary.Row.of(case, results)
        rows.append(row)
        session.note({"workload": f"{case.suite}.{case.name}:{case.batch}", "systems": results})
        tqdm.write("  ".join((f"{case.suite}.{case.name:32s}", *summary.cells(row, wanted)[2:])))
        for system, error in row.errors.items():
            tqdm.write(f"  {system} failed: {error[:200]}")
    if not rows:
        raise typer.Exit(1)
    _tell(session, rows, wanted)
    if plot is not None:
        summary.draw(summary.families(rows, wanted), plot)
    session.close()


def chosen_cases(names: Sequence[str]) -> list[Case]:
    """Return the models of suites, or single models.

    Raises:
        typer.BadParameter: a name is of neither.
    """
    cases: list[Case] = []
    for name in names:
        suite, _, model = name.partition(".")
        if suite not in SUITES or (model and model not in SUITES[suite]):
            accepted = ", ".join(SUITES) if suite not in SUITES else ", ".join(SUITES[suite])
            raise typer.BadParameter(f"{name!r} is not known; accepted: {accepted}")
        cases += [Case(suite, one, 1) for one in ([model] if model else SUITES[suite])]
    return cases


def measured(case: Case, wanted: Sequence[str], settings: Settings) -> dict[str, dict[str, object]] | str:
    """Return the results of one model's worker, or its error."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.suites.worker",
        f"{case.suite}.{case.name}:{case.batch}",
        ",".join(wanted),
    ]
    numbers = [str(settings.rounds), str(settings.seconds), str(settings.threads or "")]
    with exclusive(), group_priority(-20) if settings.priority else contextlib.nullcontext():
        try:
            done = subprocess.run(
                [*command, *numbers],
                capture_output=True,
                text=True,
                timeout=_MOST_SECONDS,
                env=os.environ,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"no answer within {_MOST_SECONDS:.0f} s"
    if done.returncode:
        return (
            done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"ended with {done.returncode}"
        )
    results: dict[str, dict[str, object]] = json.loads(done.stdout.strip().splitlines()[-1])
    return results


def _tell(session: Session, rows: Sequence[summary.Row], wanted: Sequence[str]) -> None:
    headings = summary.family_headings(wanted)
    means = [summary.family_cells(family) for family in summary.families(rows, wanted)]
    table = results_table(headings, "Times as fast as eager float32: geometric means, and the least")
    for cells in means:
        table.add_row(*cells)
    session.console.print(table)
    session.keep("geometric means by family", headings, means)
    for suite in dict.fromkeys(row.case.suite for row in rows):
        of_suite = [summary.cells(row, wanted) for row in rows if row.case.suite == suite]
        session.keep(f"{suite}, times as fast as eager float32", summary.headings(wanted), of_suite)


if __name__ == "__main__":
    typer.run(main)
