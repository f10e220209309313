"""`hf-cpu-accel report`: measure a model on this machine and write an HTML page about it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from hf_cpu_accel.cli import options
from hf_cpu_accel.cli.failures import cannot_load

# The command imports torch when it runs, so that `hf-cpu-accel --help` does not wait for it.

_DTYPES = ("float32", "bfloat16", "int8")


def report(
    model: options.Model = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="HTML file to write.")] = Path("report.html"),
    dtypes: Annotated[
        str | None,
        typer.Option(
            help="Accelerated dtypes, separated by commas [default: float32,bfloat16,int8; for a GGUF file auto].",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences, images or audio clips per call.")] = 1,
    seq: Annotated[int, typer.Option(min=1, help="Tokens per sequence.")] = 128,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; 6 or more give a 95 % interval.")] = 6,
    random_config: Annotated[str | None, options.random_config()] = None,
    threads: Annotated[int | None, options.threads()] = None,
) -> None:
    """Write an HTML page about a model: latency, memory and accuracy, also per layer, a roofline, the plan and advice.

    The page is one file and needs no network.

    hf-cpu-accel report sentence-transformers/all-MiniLM-L6-v2 --seq 32 -o minilm.html
    """
    from rich.console import Console

    from hf_cpu_accel.cli.bench.command import check_writable
    from hf_cpu_accel.cli.bench.contest import names_of
    from hf_cpu_accel.cli.loading import default_dtypes
    from hf_cpu_accel.cli.report import measure as measuring
    from hf_cpu_accel.cli.report.page import page
    from hf_cpu_accel.measure import environment
    from hf_cpu_accel.runtime.threads import apply_threads

    try:
        subject = measuring.subject(model, random_config, batch, seq)
        names = names_of("--dtypes", dtypes, default_dtypes(model, _DTYPES))
        check_writable(output, "--output")
        if importlib.util.find_spec("matplotlib") is None:
            raise ValueError("report needs matplotlib: pip install matplotlib")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    choice = apply_threads(threads)
    console = Console()
    with console.status("starting") as status:
        try:
            results = measuring.measure(
                subject, names, repeats=repeats, threads=choice.count, on_stage=status.update
            )
        except OSError as error:
            raise cannot_load(console, subject.title, error, random_config=True) from error
        except ValueError as error:
            console.print(f"{subject.title}: {error}", style="red", markup=False, highlight=False)
            raise typer.Exit(1) from error
    facts = environment.environment()
    output.write_text(page(results, facts, environment.summary(facts, choice.count)), encoding="utf-8")
    console.print(f"wrote {output}")
