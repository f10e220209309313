"""`hf-cpu-accel bench`: compare PyTorch (eager) with accelerated copies of one model, for a task and a batch shape."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from hf_cpu_accel.cli import options
from hf_cpu_accel.cli.failures import cannot_load

SUBMITTED = "bert-base-uncased"  # the model that compares machines
# The command imports torch when it runs, so that `hf-cpu-accel --help` does not wait for it.


def bench(
    model: options.Model = None,
    task: Annotated[
        str, typer.Option(help="Task, which decides the head of the model and the outputs to compare.")
    ] = "feature-extraction",
    dtypes: Annotated[
        str | None,
        typer.Option(
            help="Accelerated dtypes, separated by commas [default: float32,bfloat16,int8; for text-generation "
            "all except float32; for a GGUF file auto].",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences per call.")] = 1,
    seq: Annotated[
        int | None, typer.Option(min=1, help="Tokens per sequence [default: 128].", show_default=False)
    ] = None,
    prompt: Annotated[
        int | None,
        typer.Option(min=1, help="text-generation: tokens per prompt [default: 128].", show_default=False),
    ] = None,
    new: Annotated[
        int | None,
        typer.Option(min=2, help="text-generation: tokens to generate [default: 64].", show_default=False),
    ] = None,
    eager: Annotated[
        str | None,
        typer.Option(
            help="text-generation: dtypes of PyTorch (eager) to compare with [default: float32,bfloat16].",
            show_default=False,
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; 6 or more give a 95 % interval.")] = 10,
    random_config: Annotated[str | None, options.random_config()] = None,
    threads: Annotated[int | None, options.threads()] = None,
    json: Annotated[
        Path | None, typer.Option(help="Write all results to this file.", show_default=False)
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Write a chart to this file (.png, .svg or .pdf).", show_default=False),
    ] = None,
    submit: Annotated[
        bool,
        typer.Option(
            "--submit",
            help="Write a file to attach to an issue: CPU, tier, versions and results. Without MODEL it measures "
            f"--random-config {SUBMITTED}.",
        ),
    ] = False,
) -> None:
    """Compare PyTorch (eager) with accelerated copies of a model: latency, accuracy and memory, or tokens/s for text generation.

    The systems alternate (A B C, C B A, ...), so that a drift of the machine cancels in the speedups. Examples:

    hf-cpu-accel bench sentence-transformers/all-MiniLM-L6-v2 --seq 32

    hf-cpu-accel bench --random-config bert-base-uncased --task text-classification --plot bert.png

    hf-cpu-accel bench --random-config SmolLM2-135M --task text-generation --prompt 128 --new 64

    hf-cpu-accel bench --submit
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from hf_cpu_accel.cli import doctor
    from hf_cpu_accel.cli.bench import contest as contests
    from hf_cpu_accel.cli.bench import report as reports
    from hf_cpu_accel.cli.bench import submit as submission
    from hf_cpu_accel.measure import environment
    from hf_cpu_accel.runtime.threads import apply_threads

    if submit and model is None and random_config is None:
        random_config = SUBMITTED
    try:
        contest = contests.contest(
            model,
            random_config,
            task,
            batch=batch,
            seq=seq,
            prompt=prompt,
            new=new,
            dtypes=dtypes,
            eager=eager,
        )
        check_writable(json, "--json")
        check_writable(plot, "--plot")
        if submit and not os.access(Path.cwd(), os.W_OK):
            raise ValueError(
                f"--submit writes a file to {Path.cwd()}, which is not writable; run it in another folder"
            )
        if plot is not None and plot.suffix not in reports.CHART_SUFFIXES:
            raise ValueError(f"--plot {plot}: accepted suffixes are {', '.join(reports.CHART_SUFFIXES)}")
        if plot is not None and importlib.util.find_spec("matplotlib") is None:
            raise ValueError("--plot needs matplotlib: pip install matplotlib")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    choice = apply_threads(threads)
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("starting", total=repeats * contest.systems)
        try:
            results = contest.measure(
                repeats=repeats,
                threads=threads,
                on_stage=lambda stage: progress.update(bar, description=stage),
                on_burst=lambda system: progress.advance(bar),
            )
        except OSError as error:
            raise cannot_load(console, contest.source, error, random_config=True) from error
        except ValueError as error:  # from accelerate_for_cpu or transformers
            console.print(f"{contest.source}: {error}", style="red", markup=False, highlight=False)
            raise typer.Exit(1) from error
    facts = environment.environment()
    caption = environment.summary(facts, choice.count)
    table = contest.table(results, contest.title, caption)
    console.print(table)
    context: dict[str, object] = {
        "command": "hf-cpu-accel " + " ".join(sys.argv[1:]),
        **facts,
        "threads": choice.count,
        "thread_reason": choice.reason,
        "workload": contest.facts,
        "repeats": repeats,
    }
    if json is not None:
        reports.write_json(json, results, context)
        console.print(f"wrote {json}")
    if plot is not None:
        contest.write_chart(plot, results, contest.title, caption)
        console.print(f"wrote {plot}")
    if submit:
        path = submission.path_for(str(facts["cpu"]), contest.facts)
        submission.write(path, table, results, context, doctor.collect(peaks=True))
        console.print(f"wrote {path}: attach it to an issue")


def check_writable(path: Path | None, option: str) -> None:
    """Check the path of a result before the measurement.

    Raises:
        ValueError: the folder does not exist.
    """
    if path is not None and not path.resolve().parent.is_dir():
        raise ValueError(f"{option} {path}: {path.resolve().parent} is not a folder; create it first")
