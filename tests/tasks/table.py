"""Writes docs/tasks.md, what becomes of the pipeline of each task: `python -m tests.tasks.table`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from hf_cpu_accel import Plan, accelerate_for_cpu, explain
from hf_cpu_accel.plan import PlanItem
from tests.tasks.all import CASES

PAGE = Path(__file__).parents[2] / "docs" / "tasks.md"
WHOLE = ("encoder layer", "decoder layer")
_GENERATION = ("keys and values", "greedy search and sampling", "beam search", "continuous batching")
_HEAD = """\
# Pipeline tasks

Every task that `transformers.pipeline` knows, with a small random model of an architecture that serves it: what
`accelerate_for_cpu` makes of it, counted from `explain()`. Each of these pipelines is tested to answer as before, to
fail as before on bad input (empty text, odd and broken images, silence, no sound at all), and to be restored bit by bit.

- **fused**: each transformer layer is one call of a kernel.
- **partly fused**: attention, linears and feed-forward networks are; the layers around them run as they did.
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
        pipe = accelerate_for_cpu(case.build(), dtype="float32", compile="off")
        rows.append(f"| {name} | {case.model} | {_row(explain(pipe))} |")
    return _HEAD + "\n".join(rows) + "\n"


def _row(plan: Plan) -> str:
    whole = [item for item in plan.replaced if item.structure in WHOLE]
    inside = tuple(f"{item.name}." for item in whole)
    others = [
        item
        for item in plan.replaced
        if item.structure not in (*WHOLE, *_GENERATION) and not item.name.startswith(inside)
    ]
    left = [item for item in plan.left if _counts(item) and not item.name.startswith(inside)]
    return " | ".join((_state(whole, others), _counted(whole), _counted(others), _counted(left)))


def _state(whole: Sequence[PlanItem], others: Sequence[PlanItem]) -> str:
    if not whole and not others:
        return "left alone"
    # Attention is seen by the interface that it calls, or by its merged projections: two are the projections of two towers.
    projections = Counter(
        item.name.rpartition(".")[0] for item in others if item.structure == "merged projections"
    )
    apart = any(item.structure == "attention" for item in others) or max(projections.values(), default=0) > 2
    return "fused" if whole and not apart else "partly fused"


def _counts(item: PlanItem) -> bool:
    """Whether somebody who looks for time would want to know that this was left."""
    small = ("table lookup", "one op already", "output features", "transformers' own", "shares its weight")
    assert item.reason is not None
    return not any(part in item.reason for part in small)


def _counted(items: Sequence[PlanItem]) -> str:
    counts = Counter(item.structure for item in items)
    return ", ".join(f"{count} × {structure}" for structure, count in sorted(counts.items()))


if __name__ == "__main__":
    torch.set_num_threads(1)
    PAGE.write_text(page(), encoding="utf-8")
