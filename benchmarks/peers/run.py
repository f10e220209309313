"""Compare this package with its rivals: `make bench-peers`, or after `python -m benchmarks.peers.setup`:

python -m benchmarks.peers.run
python -m benchmarks.peers.run bert-base-uncased:1x128 --precisions int8 --rivals openvino
python -m benchmarks.peers.run vit-base:1 sd15-unet:2 --rivals openvino,eager --rounds 3
python -m benchmarks.peers.run resnet-50:1 swin-t:1 --precisions int8-static --rivals openvino
"""

from __future__ import annotations

from typing import Annotated

import typer

from benchmarks import workloads
from benchmarks.peers import summary
from benchmarks.peers.registry import CONTESTS, USUAL
from benchmarks.run import checked
from benchmarks.session import Calls, Keep, Out, Priority, Rounds, Seconds, Session, Settings, Threads


def main(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="WORKLOAD",
            help=f"MODEL:BATCHxTOKENS, or as in benchmarks/README.md [default: {' '.join(workloads.AGAINST_RIVALS)}]",
        ),
    ] = None,
    precisions: Annotated[str, typer.Option(help=f"Any of {', '.join(CONTESTS)}.")] = ",".join(USUAL),
    rivals: Annotated[
        str | None,
        typer.Option(help="Measure only rivals whose name begins with one of these, e.g. openvino,compile."),
    ] = None,
    rounds: Rounds = 7,
    seconds: Seconds = 1.0,
    calls: Calls = 3,
    threads: Threads = None,
    priority: Priority = True,
    out: Out = None,
    record: Keep = None,
) -> None:
    """Print a table per workload and precision, with as many systems as fit in memory together, and a summary."""
    wanted = [precision.strip() for precision in precisions.split(",")]
    unknown = [precision for precision in wanted if precision not in CONTESTS]
    if unknown:
        raise typer.BadParameter(f"precisions {unknown} are not known; accepted: {', '.join(CONTESTS)}")
    prefixes = tuple(prefix.strip() for prefix in rivals.split(",")) if rivals else ("",)
    planned = checked(names or workloads.AGAINST_RIVALS)
    settings = Settings(rounds, seconds, calls, threads, priority)
    session = Session("benchmarks.peers.run", settings, out, record, "Beside rivals")
    outcomes: list[summary.Outcome] = []
    for name in planned:
        for precision in wanted:
            ours, others = CONTESTS[precision]
            met = [rival for rival in others if rival.startswith(prefixes)]
            records = session.measure(name, [ours, *met], f"{name}, {precision}")
            outcomes.append(summary.Outcome(precision, ours, records))
            session.keep("summary", summary.HEADINGS, summary.rows(outcomes))
    session.console.print(summary.table(outcomes))
    session.close()


if __name__ == "__main__":
    typer.run(main)
