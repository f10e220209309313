"""Write docs/reference/tasks.md, the modules that are replaced in a pipeline of each task: `python -m tests.tasks.table`.

`tests.architectures.layers` finds the layers that run as a whole, as for docs/reference/models.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from hf_cpu_accel import Plan, accelerate_for_cpu, explain
from hf_cpu_accel.plan import PlanItem
from tests.architectures.layers import attends, linears_of_layers, told_of_layers
from tests.tasks.all import CASES
from tests.tasks.case import Case

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "tasks.md"
_GENERATION = ("KV cache", "greedy search and sampling", "beam search", "continuous batching")
_HEAD = """\
# Pipeline tasks

The table lists every task of `transformers.pipeline`, tested with a small random model. The tests check that outputs and errors
stay the same, also for bad input (empty text, broken images, silence), and that `restore` is exact bit by bit. The counts come
from `explain()`.

- **fused**: each transformer layer runs as a whole, in one op or recorded, as in [model types](models.md).
- **partly fused**: some layers run as a whole. In the others, attention, linears and feed-forward networks are fused.
- **left alone**: nothing is replaced.

**Other ops** are replaced modules outside of whole layers. **Left** are modules with weights that are not replaced, without
lookup tables, norms, and heads of a few classes. [`torch.compile`](../how-to/compile.md) can compile these. `explain(pipe)` prints
the reasons for your model. `make docs-tasks` writes this page.

| Task | Tested with | State | Whole layers | Other ops | Left |
| --- | --- | --- | --- | --- | --- |
"""


def page() -> str:
    rows = []
    for name, case in CASES.items():
        rows.append(f"| {name} | {case.model} | {_row(*_found(case))} |")
    return _HEAD + "\n".join(rows) + "\n"


def _found(case: Case) -> tuple[Plan, dict[str, str | None]]:
    """Return the plan after one call, which records layers, and {path of a transformer layer: None, or why it is not whole}."""
    pipe = case.build()
    (args, options), model = case.calls[0], pipe.model
    linears = linears_of_layers(model)
    if linears and not attends(model, list(linears), lambda: pipe(*args, **options)):
        linears = {}
    accelerate_for_cpu(pipe, dtype="float32")
    pipe(*args, **options)
    plan = explain(model)
    return plan, told_of_layers(linears, plan)


def _row(plan: Plan, layers: Mapping[str, str | None]) -> str:
    whole = [item for item in plan.replaced if item.scope == "layer"]
    inside = tuple(f"{item.name}." for item in whole)
    others = [
        item
        for item in plan.replaced
        if item.scope != "layer" and item.structure not in _GENERATION and not item.name.startswith(inside)
    ]
    left = [item for item in plan.left if _counts(item) and not item.name.startswith(inside)]
    return " | ".join((_state(layers, whole or others), _counted(whole), _counted(others), _counted(left)))


def _state(layers: Mapping[str, str | None], replaced: Sequence[PlanItem]) -> str:
    if not replaced:
        return "left alone"
    return "fused" if layers and not any(layers.values()) else "partly fused"


def _counts(item: PlanItem) -> bool:
    """Return whether a module that was not replaced may take noticeable time."""
    small = (
        "table lookup: nothing",
        "a single op",
        "output features",
        "of transformers",
        "shares its weight",
    )
    assert item.reason is not None
    return not any(part in item.reason for part in small)


def _counted(items: Sequence[PlanItem]) -> str:
    counts = Counter(item.structure for item in items)
    return ", ".join(f"{count} × {structure}" for structure, count in sorted(counts.items()))


if __name__ == "__main__":
    torch.set_num_threads(1)
    PAGE.write_text(page(), encoding="utf-8")
