"""The benchmark of the project: `python -m benchmarks.run`, or `make bench`.

python -m benchmarks.run bert-base-uncased:1x128 --systems ours-fp32,ours-int8,compile-fp32,openvino-int8
python -m benchmarks.run vit-base:1 sd15-unet:2 --systems eager-bf16,ours-bf16 --rounds 3
python -m benchmarks.run --record benchmarks/results
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from benchmarks import systems, workloads
from benchmarks.peers.registry import PEERS
from benchmarks.session import (
    Calls,
    Keep,
    Out,
    Priority,
    Rounds,
    Seconds,
    Session,
    Settings,
    Threads,
    chosen_systems,
)

_ALL = (*systems.SYSTEMS, *PEERS)


def main(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="WORKLOAD",
            help=f"MODEL:BATCHxTOKENS, or as in benchmarks/README.md [default: {' '.join(workloads.DEFAULT)}]",
        ),
    ] = None,
    chosen: Annotated[str, typer.Option("--systems", help=f"Any of {', '.join(_ALL)}.")] = ",".join(
        systems.DEFAULT
    ),
    rounds: Rounds = 7,
    seconds: Seconds = 1.0,
    calls: Calls = 3,
    threads: Threads = None,
    priority: Priority = True,
    out: Out = None,
    record: Keep = None,
) -> None:
    """Measure eager, torch's own alternatives and this package, side by side on this machine."""
    wanted = chosen_systems(chosen, _ALL)
    planned = checked(names or workloads.DEFAULT)
    session = Session(
        "benchmarks.run", Settings(rounds, seconds, calls, threads, priority), out, record, "Beside torch"
    )
    for name in planned:
        session.measure(name, wanted)
    session.close()


def checked(names: Sequence[str]) -> list[str]:
    """The names of workloads, refused before anything is measured if one of them is wrong."""
    for name in names:
        try:
            workloads.parse(name)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
    return list(names)


if __name__ == "__main__":
    typer.run(main)
