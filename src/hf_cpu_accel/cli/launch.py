"""`hf-cpu-accel launch`: run a script in one or more processes, with cores, threads, allocator and huge pages set."""

from __future__ import annotations

from typing import Annotated

import typer

from hf_cpu_accel.cli import options

CONTEXT = {"allow_interspersed_args": False}  # arguments after the script belong to the script


def launch(
    command: Annotated[list[str], typer.Argument(metavar="SCRIPT [ARGS]...", show_default=False)],
    instances: Annotated[int, typer.Option(min=1, help="Number of processes that run the script.")] = 1,
    threads: Annotated[
        int | None,
        options.threads("Threads and cores per process [default: an equal share of the available cores]."),
    ] = None,
    module: Annotated[
        bool, typer.Option("--module", "-m", help="SCRIPT is the name of a module, as for python -m.")
    ] = False,
    allocator: Annotated[
        str,
        typer.Option(
            help="Memory allocator: jemalloc, tcmalloc, default, or auto (jemalloc or tcmalloc if installed)."
        ),
    ] = "auto",
    pin: Annotated[bool, typer.Option(help="Pin each process to its own cores.")] = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the settings without running the script.")
    ] = False,
) -> None:
    """Run a Python script with the best process settings for inference, and print the settings and their reasons.

    hf-cpu-accel launch --instances 2 --threads 4 serve.py --port 8000

    Affinity, container quota and NUMA nodes are respected. Environment variables that are already set stay unchanged.
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
