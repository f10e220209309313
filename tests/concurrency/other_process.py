"""What `test_spawn.py` has done in processes that are started afresh: they import this file."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from benchmarks.soak.served import SERVED
from hf_cpu_accel import explain, restore


def report(folder: str, names: list[tuple[str, str]]) -> dict[str, Any]:
    """What becomes of the accelerated models that lie in `folder`, one file each, and of the originals in them."""
    torch.set_num_threads(1)
    return {f"{name} {dtype}": _report(Path(folder) / f"{name}-{dtype}", name) for name, dtype in names}


def _report(file: Path, name: str) -> dict[str, Any]:
    served, model = SERVED[name], pickle.loads(file.read_bytes())
    found: dict[str, Any] = {
        "replaced": len(explain(model).replaced),
        "answers": [served.answer(model, number).tolist() for number in range(2)],
    }
    try:
        found["restored"] = served.answer(restore(model), 0).tolist()
    except RuntimeError as error:
        found["restored"] = str(error)
    return found


def answers_of(name: str, dtype: str) -> list[Any]:
    """Of a model that is loaded and accelerated here, as a worker of a server does it."""
    from hf_cpu_accel import accelerate_for_cpu

    served = SERVED[name]
    model = accelerate_for_cpu(served.build(), dtype=dtype, threads=1)
    return [served.answer(model, number).tolist() for number in range(2)]
