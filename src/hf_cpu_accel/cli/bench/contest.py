"""Which two halves of `hf-cpu-accel bench` serve a task: one forward call, or a text generated token by token."""

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
    """What is measured and how it is shown.

    source: the model. title: model, task and shape. facts: the same for JSON. systems: how many take turns.
    measure(repeats, threads, on_stage, on_burst) gives a list of results, which have `to_dict()`;
    table(results, title, caption) and write_chart(path, results, title, caption) show them.
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
    """Check the arguments of the command line, None where they were not given; loads no weights yet.

    Raises ValueError naming the argument and the remedy.
    """
    if task == workload.TEXT_GENERATION:
        _refuse({"--seq": seq}, f"says nothing to --task {task}; use --prompt and --new")
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
    _refuse({"--prompt": prompt, "--new": new, "--eager": eager}, "is for --task text-generation")
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
    option: str, given: str | None, default: Sequence[str], accepted: Sequence[str] = DTYPES
) -> list[str]:
    """What an option lists, separated by commas.

    Raises:
        ValueError: nothing, or a name that is not accepted.
    """
    names = list(default) if given is None else [name.strip() for name in given.split(",") if name.strip()]
    if not names:
        raise ValueError(f"{option} {given!r} names none; accepted are {', '.join(accepted)}")
    for name in names:  # a misspelt one is told before a model is loaded
        if name not in accepted:
            raise ValueError(f"{option} {name!r} is unknown, accepted: {', '.join(accepted)}")
    return names


def _refuse(options: dict[str, object], why: str) -> None:
    for option, value in options.items():
        if value is not None:
            raise ValueError(f"{option} {value} {why}")
