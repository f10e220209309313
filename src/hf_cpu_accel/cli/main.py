"""The application `hf-cpu-accel`. Commands import torch only when they run, so that `--help` is fast."""

from __future__ import annotations

from typing import Annotated

import typer

from hf_cpu_accel.cli.bench.command import bench
from hf_cpu_accel.cli.chat import chat
from hf_cpu_accel.cli.demo import demo
from hf_cpu_accel.cli.doctor import doctor, versions
from hf_cpu_accel.cli.export import export
from hf_cpu_accel.cli.launch import CONTEXT, launch
from hf_cpu_accel.cli.pack import pack
from hf_cpu_accel.cli.quantize.command import quantize
from hf_cpu_accel.cli.report.command import report
from hf_cpu_accel.cli.serve import serve
from hf_cpu_accel.cli.supports.command import supports

app = typer.Typer(
    name="hf-cpu-accel",
    help="Make Hugging Face models fast on CPUs: check the machine, measure, quantize, chat with and serve models.",
    no_args_is_help=True,
    add_completion=False,
)
app.command()(doctor)
app.command()(bench)
app.command()(chat)
app.command()(demo)
app.command()(export)
app.command(context_settings=CONTEXT)(launch)
app.command()(pack)
app.command()(quantize)
app.command()(report)
app.command()(serve)
app.command()(supports)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(versions()["hf_cpu_accel"] or "not installed, runs from its source folder")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Make Hugging Face models fast on CPUs: check the machine, measure, quantize, chat with and serve models."""
