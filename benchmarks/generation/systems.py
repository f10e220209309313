"""The systems: eager, and this package in each of its dtypes; from a bfloat16 checkpoint to the model that is timed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from hf_cpu_accel import accelerate_for_cpu
from hf_cpu_accel.config import DTYPES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Prepare = Callable[["PreTrainedModel"], "PreTrainedModel"]

BASE = "eager-bf16"
_SHORT = {"float32": "fp32", "bfloat16": "bf16"}


def _eager(model: PreTrainedModel, dtype: str) -> PreTrainedModel:
    return model.to(getattr(torch, dtype))


def _compiled(model: PreTrainedModel, dtype: str) -> PreTrainedModel:
    model = _eager(model, dtype)
    model.forward = torch.compile(model.forward, dynamic=True)  # type: ignore[method-assign]
    return model


def _ours(model: PreTrainedModel, dtype: str) -> PreTrainedModel:
    # It is not restored; float32 packs what bfloat16 weights hold.
    return accelerate_for_cpu(model.float() if dtype == "float32" else model, dtype=dtype, originals="drop")


# system -> (dtype of its weights, what makes it of the checkpoint)
SYSTEMS: dict[str, tuple[str, Prepare]] = {
    BASE: ("bfloat16", partial(_eager, dtype="bfloat16")),
    "eager-fp32": ("float32", partial(_eager, dtype="float32")),
    "compile-bf16": ("bfloat16", partial(_compiled, dtype="bfloat16")),
} | {
    f"ours-{_SHORT.get(dtype, dtype)}": (dtype, partial(_ours, dtype=dtype))
    for dtype in DTYPES
    if dtype != "auto"
}

# float32 weights are twice what is used for writing, and compiling takes minutes.
DEFAULT = tuple(
    name for name, (dtype, _) in SYSTEMS.items() if dtype != "float32" and not name.startswith("compile")
)
