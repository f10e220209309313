"""The benchmark of the project: `python -m benchmarks.run`, or `make bench`.

python -m benchmarks.run bert-base-uncased:1x128 --systems ours-fp32,ours-int8,compile-fp32
python -m benchmarks.run --markdown benchmarks/RESULTS.md
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from benchmarks import harness, report, systems, workloads
from benchmarks.driver import WorkerError
from hf_cpu_accel.measure.environment import environment
from hf_cpu_accel.runtime.home import home_folder
from hf_cpu_accel.runtime.threads import apply_threads


def main(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL:BATCHxTOKENS", help=f"[default: {' '.join(workloads.DEFAULT)}]"),
    ] = None,
    chosen: Annotated[
        str, typer.Option("--systems", help=f"Any of {', '.join(systems.SYSTEMS)}.")
    ] = ",".join(systems.DEFAULT),
    rounds: Annotated[
        int, typer.Option(min=1, help="Bursts of each system; 6 or more give an interval.")
    ] = 7,
    seconds: Annotated[float, typer.Option(min=0, help="Least length of a burst.")] = 1.0,
    calls: Annotated[int, typer.Option(min=1, help="Least number of calls of a burst.")] = 3,
    threads: Annotated[int | None, typer.Option(min=1, help="For every system.")] = None,
    priority: Annotated[bool, typer.Option(help="Put other sessions behind, where permitted.")] = True,
    out: Annotated[Path | None, typer.Option(help="JSON lines are appended here.")] = None,
    markdown: Annotated[
        Path | None, typer.Option(help="Write the tables between the marker lines of this file.")
    ] = None,
) -> None:
    """Measure eager, torch's own alternatives and this package, side by side on this machine."""
    console = Console()
    wanted = [name.strip() for name in chosen.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in systems.SYSTEMS]
    if unknown:
        raise typer.BadParameter(f"systems {unknown} are not known; accepted: {', '.join(systems.SYSTEMS)}")
    planned = names or list(workloads.DEFAULT)
    for name in planned:
        try:
            workloads.parse(name)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
    count = apply_threads(threads).count
    facts = environment()
    command = "python -m benchmarks.run " + " ".join(sys.argv[1:])
    destination = out or home_folder() / "bench" / "results.jsonl"
    destination.parent.mkdir(parents=True, exist_ok=True)
    sections = [report.heading(facts, command.strip(), count)]
    for name in planned:
        with console.status(name) as status:
            try:
                records = harness.run(
                    name,
                    wanted,
                    rounds=rounds,
                    calls=calls,
                    seconds=seconds,
                    threads=threads,
                    priority=priority,
                    say=status.update,
                )
            except WorkerError as error:
                console.print(f"[red]{name}: {escape(str(error))}[/red]", highlight=False)
                raise typer.Exit(1) from error
        console.print(report.table(name, records))
        sections.append(report.markdown(name, records))
        with destination.open("a", encoding="utf-8") as lines:
            for record in records:
                lines.write(json.dumps({**facts, "command": command, **record.to_dict()}) + "\n")
        if markdown is not None:  # after each workload: an interrupted run keeps what it has
            report.write_markdown(markdown, "\n".join(sections))
    console.print(f"[dim]results appended to {destination}[/dim]", highlight=False)


if __name__ == "__main__":
    typer.run(main)
