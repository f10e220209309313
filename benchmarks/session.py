"""Run the harness over several workloads: print each table, and write JSON lines and the machine's results."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from rich.markup import escape

from benchmarks import harness, report
from benchmarks.driver import WorkerError
from benchmarks.results import pages, store
from hf_cpu_accel.cli.tables import wide_console
from hf_cpu_accel.measure.environment import environment
from hf_cpu_accel.runtime.home_folder import home_folder
from hf_cpu_accel.runtime.private_files import make_folder
from hf_cpu_accel.runtime.threads import apply_threads

# The options that the commands share.
Rounds = Annotated[int, typer.Option(min=1, help="Bursts of each system; 6 or more give an interval.")]
Seconds = Annotated[float, typer.Option(min=0, help="Minimum length of a burst, in seconds.")]
Calls = Annotated[
    int,
    typer.Option(min=1, help="Minimum number of calls of a burst; one where a call takes over two seconds."),
]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads of every system.")]
Priority = Annotated[bool, typer.Option(help="Run with priority over other processes, where permitted.")]
Out = Annotated[Path | None, typer.Option(help="File to append JSON lines to.")]
Keep = Annotated[
    Path | None,
    typer.Option(
        "--record",
        help="Folder of results (benchmarks/results): replace the tables of this machine, and regenerate its page.",
    ),
]


def chosen_systems(names: str, known: Sequence[str]) -> list[str]:
    """Return the systems of a comma-separated list. Reject names that are not in `known`."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise typer.BadParameter(f"systems {unknown} are not known; accepted: {', '.join(known)}")
    return wanted


def check_folder(folder: Path | None) -> None:
    """Reject a path that is no folder before minutes of measuring."""
    if folder is not None and not folder.is_dir():
        raise typer.BadParameter(f"--record: {folder} is no folder")


def keep(folder: Path | None, tables: Sequence[store.Table]) -> None:
    """Write tables into the data file of this machine, and generate its pages."""
    if folder is not None:
        store.record(folder, tables)
        pages.write(folder)


@dataclass(frozen=True)
class Settings:
    """Settings for every workload of a run; see `harness.run`."""

    rounds: int = 7
    seconds: float = 1.0
    calls: int = 3
    threads: int | None = None
    priority: bool = True


@dataclass(frozen=True)
class GenerationSettings:
    """Settings for every model of a run; see `generation/harness.py`."""

    prompt: int
    new: int
    rounds: int
    threads: int | None = None
    priority: bool = True


class Session:
    """Runs workloads under the same settings. `module` is the command's, `group` the heading of its tables.

    run(workload, systems, say=..., and the settings' fields) measures; its records have `to_dict()`, and `show` has the
    HEADINGS, cells(record), note(records) and table(title, records) that make what is seen of them.
    """

    def __init__(
        self,
        module: str,
        settings: Settings | GenerationSettings,
        out: Path | None,
        folder: Path | None,
        group: str,
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
        self._folder, self._group = folder, group
        check_folder(folder)
        self._threads = apply_threads(settings.threads).count

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
        for record in records:
            self.note(record.to_dict())
        rows = [self._show.cells(record) for record in records]
        self.keep(title, self._show.HEADINGS, rows, self._show.note(records))
        return records

    def note(self, numbers: Mapping[str, object]) -> None:
        """Append a line of JSON with the facts of the machine."""
        with self._out.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({**self._facts, "command": self._command, **numbers}) + "\n")

    def keep(
        self, title: str, headings: Sequence[str], rows: Sequence[tuple[str, ...]], note: str = ""
    ) -> None:
        """Record a table in the results of this machine, after each measurement, so that an interrupted run loses nothing."""
        columns = tuple(heading.replace("\n", " ") for heading in headings)
        setup, versions = report.setup(self._facts, self._threads), report.versions(self._facts)
        date = str(self._facts["date"])
        table = store.Table(
            self._group, title, date, self._command, setup, versions, columns, tuple(rows), note
        )
        keep(self._folder, [table])

    def close(self) -> None:
        """Print where the numbers are."""
        self.console.print(f"[dim]results appended to {self._out}[/dim]", highlight=False)
