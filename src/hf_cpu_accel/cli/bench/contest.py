"""The measurement and the report of `hf-cpu-accel bench` for a task: one forward call, or text generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hf_cpu_accel.cli.bench import (
    generation_measure,
    generation_report,
    generation_workload,
    measure,
    report,
    workload,
)
from hf_cpu_accel.cli.loading import default_dtypes
from hf_cpu_accel.config import DTYPES

_FORWARD_DTYPES = ("float32", "bfloat16", "int8")


@dataclass(frozen=True)
class Contest:
    """A measurement and the functions that show its results.

    Attributes:
        source: name of the model.
        title: model, task and shape.
        facts: the same for JSON.
        systems: number of systems that are compared.
        measure: `measure(repeats, threads, on_stage, on_burst)` returns a list of results with `to_dict()`.
        table: `table(results, title, caption)` returns a table.
        write_chart: `write_chart(path, results, title, caption)` writes a chart.
    """

    source: str
    title: str
    facts: dict[str, object]
    systems: int
    measure: Callable[..., Sequence[Any]]
    table: Callable[..., Any]
    write_chart: Callable[..., None]


def contest(
    model: str | None,
    random_config: str | None,
    task: str,
    *,
    batch: int,
    seq: int | None,
    prompt: int | None,
    new: int | None,
    dtypes: str | None,
    eager: str | None,
) -> Contest:
    """Check the arguments of the command line, None for absent ones, and return the contest. No weights are loaded.

    Raises:
        ValueError: a wrong argument; the message contains the remedy.
    """
    if task == workload.TEXT_GENERATION:
        _reject({"--seq": seq}, f"does not apply to --task {task}; use --prompt and --new")
        names = names_of("--dtypes", dtypes, default_dtypes(model, generation_measure.DEFAULT_DTYPES))
        against = names_of("--eager", eager, generation_measure.EAGER, generation_measure.EAGER)
        generation = generation_workload.workload(model, random_config, batch, prompt or 128, new or 64)
        return Contest(
            generation.title,
            str(generation),
            generation.facts,
            len(against) + len(names),
            partial(generation_measure.measure, generation, names, against),
            generation_report.table,
            generation_report.write_chart,
        )
    _reject(
        {"--prompt": prompt, "--new": new, "--eager": eager},
        "needs --task text-generation; add it, or use --seq",
    )
    names = names_of("--dtypes", dtypes, default_dtypes(model, _FORWARD_DTYPES))
    forward = workload.workload(model, random_config, task, batch, seq or 128)
    return Contest(
        forward.title,
        str(forward),
        forward.facts,
        1 + len(names),
        partial(measure.measure, forward, names),
        report.table,
        report.write_chart,
    )


def names_of(
    option: str, value: str | None, default: Sequence[str], accepted: Sequence[str] = DTYPES
) -> list[str]:
    """Split the comma-separated value of an option.

    Args:
        option: name of the option, for messages.
        value: the value, or None for `default`.
        default: the names without a value.
        accepted: the accepted names.

    Raises:
        ValueError: no name, or a name that is not accepted.
    """
    names = list(default) if value is None else [name.strip() for name in value.split(",") if name.strip()]
    if not names:
        raise ValueError(f"{option} {value!r} is empty; accepted: {', '.join(accepted)}")
    for name in names:  # before a model is loaded
        if name not in accepted:
            raise ValueError(f"{option} {name!r} is unknown; accepted: {', '.join(accepted)}")
    return names


def _reject(options: dict[str, object], why: str) -> None:
    """
    Raises:
        ValueError: an option has a value.
    """
    for option, value in options.items():
        if value is not None:
            raise ValueError(f"{option} {value} {why}")
