"""`hf-cpu-accel launch`: run a script pinned, with threads, allocator and huge pages set, once or several times at once."""

from __future__ import annotations

from typing import Annotated

import typer

from hf_cpu_accel.cli import options

CONTEXT = {"allow_interspersed_args": False}  # what stands behind the script is the script's


def launch(
    command: Annotated[list[str], typer.Argument(metavar="SCRIPT [ARGS]...", show_default=False)],
    instances: Annotated[int, typer.Option(min=1, help="How many processes run the script.")] = 1,
    threads: Annotated[
        int | None,
        options.threads("Threads, and cores, of each [default: an equal share of what may be used]."),
    ] = None,
    module: Annotated[
        bool, typer.Option("--module", "-m", help="SCRIPT is a module, as of python -m.")
    ] = False,
    allocator: Annotated[
        str, typer.Option(help="auto (jemalloc, else tcmalloc, if installed), jemalloc, tcmalloc or default.")
    ] = "auto",
    pin: Annotated[bool, typer.Option(help="Give each process cores of its own.")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the table only.")] = False,
) -> None:
    """Run a Python script with what inference wants of a process, and print what was set and why.

    hf-cpu-accel launch --instances 2 --threads 4 serve.py --port 8000

    Affinity, container quota and memory nodes are respected; variables that are set already stay as they are.
    """
    from rich.console import Console

    from hf_cpu_accel.serve.instances import launch as launching
    from hf_cpu_accel.serve.instances.settings import table

    try:
        plan = launching.plan(("-m", *command) if module else command, instances, threads, allocator, pin=pin)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    Console(stderr=True, highlight=False).print(table(plan.settings))
    if not dry_run:
        raise typer.Exit(launching.run(plan))
