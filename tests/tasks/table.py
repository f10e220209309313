"""Writes docs/reference/tasks.md, what becomes of the pipeline of each task: `python -m tests.tasks.table`.

Which layers are whole is decided as for docs/reference/models.md, by `tests.architectures.layers`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from hf_cpu_accel import Plan, accelerate_for_cpu, explain
from hf_cpu_accel.plan import PlanItem
from tests.architectures.layers import WHOLE, attends, linears_of_layers, told_of_layers
from tests.tasks.all import CASES
from tests.tasks.case import Case

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "tasks.md"
_GENERATION = ("KV cache", "greedy search and sampling", "beam search", "continuous batching")
_HEAD = """\
# Pipeline tasks

Every task that `transformers.pipeline` knows, with a small random model of an architecture that serves it: what
`accelerate_for_cpu` makes of it, counted from `explain()`. Each of these pipelines is tested to answer as before, to
fail as before on bad input (empty text, odd and broken images, silence, no sound at all), and to be restored bit by bit.

- **fused**: each transformer layer runs as a whole, as [every model type](models.md) has it: in one call of a kernel, or recorded.
- **partly fused**: some layers run as a whole; of the others attention, linears and feed-forward networks are fused.
- **left alone**: nothing is replaced.

*Other ops* are replaced modules outside of whole layers; *left* are modules with weights that run as they did, without
lookup tables, norms, and heads for a few classes. What `compile=` does besides is told in [torch.compile](compile.md),
and `explain(pipe)` gives the reasons for your own model. This page is written by `make docs-tasks`.

| Task | Tested with | State | Whole layers | Other ops | Left |
| --- | --- | --- | --- | --- | --- |
"""


def page() -> str:
    rows = []
    for name, case in CASES.items():
        rows.append(f"| {name} | {case.model} | {_row(*_found(case))} |")
    return _HEAD + "\n".join(rows) + "\n"


def _found(case: Case) -> tuple[Plan, dict[str, str | None]]:
    """Return the plan after one call, in which layers are recorded, and {path of a transformer layer: why it is not whole}."""
    pipe = case.build()
    (args, options), model = case.calls[0], pipe.model
    linears = linears_of_layers(model)
    if linears and not attends(model, list(linears), lambda: pipe(*args, **options)):
        linears = {}
    accelerate_for_cpu(pipe, dtype="float32", compile="off")
    pipe(*args, **options)
    plan = explain(model)
    return plan, told_of_layers(linears, plan)


def _row(plan: Plan, layers: Mapping[str, str | None]) -> str:
    whole = [item for item in plan.replaced if item.structure in WHOLE]
    inside = tuple(f"{item.name}." for item in whole)
    others = [
        item
        for item in plan.replaced
        if item.structure not in {*WHOLE, *_GENERATION} and not item.name.startswith(inside)
    ]
    left = [item for item in plan.left if _counts(item) and not item.name.startswith(inside)]
    return " | ".join((_state(layers, whole or others), _counted(whole), _counted(others), _counted(left)))


def _state(layers: Mapping[str, str | None], replaced: Sequence[PlanItem]) -> str:
    if not replaced:
        return "left alone"
    return "fused" if layers and not any(layers.values()) else "partly fused"


def _counts(item: PlanItem) -> bool:
    """Whether somebody who looks for time would want to know that this was left."""
    small = ("table lookup", "a single op", "output features", "of transformers", "shares its weight")
    assert item.reason is not None
    return not any(part in item.reason for part in small)


def _counted(items: Sequence[PlanItem]) -> str:
    counts = Counter(item.structure for item in items)
    return ", ".join(f"{count} × {structure}" for structure, count in sorted(counts.items()))


if __name__ == "__main__":
    torch.set_num_threads(1)
    PAGE.write_text(page(), encoding="utf-8")
