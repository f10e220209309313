"""`hf-cpu-accel demo`: accelerate a trained model with one line, and compare its results and its speed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from hf_cpu_accel.cli import options

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from torch import Tensor

    from hf_cpu_accel.cli.demo_measure import Result
    from hf_cpu_accel.plan import Plan

_QUERIES = (
    "How do I repair a punctured tyre?",
    "Will the weather be bad tomorrow?",
    "medicine for a high temperature",
)
_SHOWN = 3


def demo(
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds of measurement.")] = 5,
    threads: Annotated[int | None, options.threads()] = None,
) -> None:
    """Search sentences with MiniLM before and after acceleration, then compare dtypes. Needs no network."""
    from rich.console import Console
    from rich.rule import Rule

    from hf_cpu_accel import accelerate_for_cpu, explain, restore
    from hf_cpu_accel.cli import demo_measure
    from hf_cpu_accel.measure import environment
    from hf_cpu_accel.runtime.threads import apply_threads

    console = Console()
    choice = apply_threads(threads)
    try:
        with console.status("loading all-MiniLM-L6-v2"):
            model = demo_measure.load_minilm()
    except ModuleNotFoundError as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        raise typer.Exit(1) from error
    texts = demo_measure.sentences()

    console.print(Rule("The same search, before and after", align="left"))
    before, queries = demo_measure.embed(model, texts), demo_measure.embed(model, _QUERIES)
    accelerate_for_cpu(model)
    plan = explain(model)
    after, queries_after = demo_measure.embed(model, texts), demo_measure.embed(model, _QUERIES)
    console.print("[bold]accelerate_for_cpu(model)[/bold] on all-MiniLM-L6-v2 (trained weights);")
    console.print(f"{len(texts)} sentences ranked by similarity to a query:\n")
    console.print(_rankings(texts, (before, queries), (after, queries_after), plan.dtype))
    console.print(f"\n[bold]explain(model)[/bold]: {_plan_summary(plan)}")
    restore(model)
    _print_restored(console, bool((demo_measure.embed(model, texts) == before).all()))

    console.print()
    console.print(Rule("Speed and accuracy", align="left"))
    with console.status("measuring") as status:
        results = demo_measure.measure(model, texts, rounds=rounds, on_stage=status.update)
    console.print(_comparison(results))
    console.print(
        f"single: one sentence per call; batched: {len(texts)} sentences in batches of "
        f"{demo_measure.BATCH_SIZE}; cosine and Spearman: against PyTorch (eager) in float32",
        style="dim",
    )
    console.print(environment.summary(environment.environment(), choice.count), style="dim", highlight=False)


def _rankings(
    texts: Sequence[str],
    before: tuple[Tensor, Tensor],
    after: tuple[Tensor, Tensor],
    dtype: str,
) -> Table:
    """Return both rankings side by side.

    Args:
        texts: the sentences.
        before: embeddings of the sentences and of the queries from the original model.
        after: the same from the accelerated model.
        dtype: dtype of the accelerated model.
    """
    from rich import box
    from rich.table import Table

    from hf_cpu_accel.cli.demo_measure import rank

    out = Table("before (eager float32)", f"after ({dtype})", box=box.SIMPLE_HEAD, pad_edge=False)
    for number, query in enumerate(_QUERIES):
        out.add_row(f"[bold]{query}[/bold]")
        columns = []
        for corpus, queries in (before, after):
            best = rank(queries[number], corpus, _SHOWN)
            columns.append("\n".join(f"{score:.3f} {_shorten(texts[row])}" for row, score in best))
        out.add_row(*columns, end_section=True)
    return out


def _shorten(text: str, width: int = 31) -> str:
    return text if len(text) <= width else text[: width - 1].rstrip() + "…"


def _plan_summary(plan: Plan) -> str:
    replaced = ", ".join(f"{count} x {structure}" for structure, count in plan.counts().items())
    kernels = f"{plan.kernels} kernels, tier {plan.tier}, {plan.threads} threads"
    return f"{replaced or 'nothing replaced'}; {len(plan.left)} modules left; {kernels}"


def _print_restored(console: Console, identical: bool) -> None:
    if identical:
        console.print("[bold]restore(model)[/bold]: the embeddings are bit-identical to the original ones")
    else:
        console.print(
            "[red]restore(model): the embeddings differ from the original ones; please report this[/red]"
        )


def _comparison(results: Sequence[Result]) -> Table:
    from hf_cpu_accel.cli.demo_measure import EAGER
    from hf_cpu_accel.cli.tables import colored_ratio, milliseconds, results_table

    headings = (
        "system",
        "single\nlatency ms",
        "speedup",
        "batched\ntexts/s",
        "speedup",
        "worst\ncosine",
        "Spearman\nof pairs",
    )
    out = results_table(headings)
    for result in results:
        eager = result.system == EAGER
        out.add_row(
            result.system,
            milliseconds(result.latency),
            "1.00x" if eager else colored_ratio(result.latency_speedup),
            f"{result.throughput:.0f}",
            "1.00x" if eager else colored_ratio(result.throughput_speedup),
            "-" if eager else f"{result.agreement.worst_cosine:.5f}",
            "-" if eager else f"{result.spearman:.5f}",
        )
    return out
