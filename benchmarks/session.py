"""One run of the harness over several workloads: shown as it goes, and kept as JSON lines and markdown."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from rich.markup import escape

from benchmarks import harness, report
from benchmarks.driver import WorkerError
from hf_cpu_accel.cli.tables import wide_console
from hf_cpu_accel.measure.environment import environment
from hf_cpu_accel.runtime.home import home_folder
from hf_cpu_accel.runtime.private import make_folder
from hf_cpu_accel.runtime.threads import apply_threads

# The options that the commands share.
Rounds = Annotated[int, typer.Option(min=1, help="Bursts of each system; 6 or more give an interval.")]
Seconds = Annotated[float, typer.Option(min=0, help="Least length of a burst.")]
Calls = Annotated[
    int,
    typer.Option(min=1, help="Least number of calls of a burst; one where a call takes over two seconds."),
]
Threads = Annotated[int | None, typer.Option(min=1, help="For every system.")]
Priority = Annotated[bool, typer.Option(help="Put other sessions behind, where permitted.")]
Out = Annotated[Path | None, typer.Option(help="JSON lines are appended here.")]
Markdown = Annotated[
    Path | None, typer.Option(help="Write the tables between the marker lines of this file.")
]


def chosen_systems(names: str, known: Sequence[str]) -> list[str]:
    """The systems of a comma-separated list, refused if one of them is not `known`."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise typer.BadParameter(f"systems {unknown} are not known; accepted: {', '.join(known)}")
    return wanted


def check_markdown(markdown: Path | None, section: str) -> None:
    """Refuse a file without a place for the section: minutes of measuring must not end there."""
    if markdown is not None:
        try:
            report.around_section(markdown, section)
        except (OSError, ValueError) as error:
            raise typer.BadParameter(f"--markdown: {error}") from error


@dataclass(frozen=True)
class Settings:
    """How every workload of a run is measured; see `harness.run`."""

    rounds: int = 7
    seconds: float = 1.0
    calls: int = 3
    threads: int | None = None
    priority: bool = True


@dataclass(frozen=True)
class GenerationSettings:
    """How every model of a run is measured; see `generation_harness.run`."""

    prompt: int
    new: int
    rounds: int
    threads: int | None = None
    priority: bool = True


class Session:
    """Runs workloads under the same settings. `module` is the command's, `section` its part of the markdown file.

    run(workload, systems, say=..., and the settings' fields) measures; of its records, which have `to_dict()`, show.table and
    show.markdown make what is seen.
    """

    def __init__(
        self,
        module: str,
        settings: Settings | GenerationSettings,
        out: Path | None,
        markdown: Path | None,
        section: str,
        run: Callable[..., Sequence[Any]] = harness.run,
        show: ModuleType = report,
    ) -> None:
        self._run, self._show = run, show
        self.console = wide_console()
        self._settings = settings
        self._facts = environment()
        self._command = " ".join(["python -m", module, *sys.argv[1:]])
        self._out = out or home_folder() / "bench" / "results.jsonl"
        make_folder(self._out.parent)
        self._markdown, self._section = markdown, section
        check_markdown(markdown, section)
        threads = apply_threads(settings.threads).count
        self._parts = [report.heading(self._facts, self._command, threads)]

    def measure(self, workload: str, systems: Sequence[str], title: str | None = None) -> Sequence[Any]:
        """Measure, print and keep one table. Ends the command if the base of the ratios cannot be measured."""
        title = title or workload
        with self.console.status(title) as status:
            try:
                records = self._run(workload, systems, **asdict(self._settings), say=status.update)
            except WorkerError as error:
                self.console.print(f"[red]{title}: {escape(str(error))}[/red]", highlight=False)
                raise typer.Exit(1) from error
        self.console.print(self._show.table(title, records))
        with self._out.open("a", encoding="utf-8") as lines:
            for record in records:
                row = {**self._facts, "command": self._command, **record.to_dict()}
                lines.write(json.dumps(row) + "\n")
        self._parts.append(self._show.markdown(title, records))
        self.write()
        return records

    def write(self, summary: str = "") -> None:
        """The markdown so far, `summary` first: done after each table, so that an interrupted run keeps what it has."""
        if self._markdown is not None:
            heading, *tables = self._parts
            parts = [heading, *([summary] if summary else []), *tables]
            report.write_markdown(self._markdown, "\n".join(parts), self._section)

    def close(self) -> None:
        """Tell where the numbers are."""
        self.console.print(f"[dim]results appended to {self._out}[/dim]", highlight=False)
