"""Load the MODEL of a command: an id, a folder, or a GGUF file. Accelerated models use the blocks of a GGUF file directly."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_cpu_accel.frontends.gguf import load_in_blocks, located, split_path

Load = Callable[[], Any]


def load_eager(model: str, auto_class: str, dtype: torch.dtype) -> Any:
    """Load `model` with an auto class of transformers, in eval mode; the weights of a GGUF file are dequantized to `dtype`."""
    import transformers

    name, options = located(model)
    return getattr(transformers, auto_class).from_pretrained(name, dtype=dtype, **options).eval()


def blocks_of(model: str, auto_class: str) -> Load | None:
    """Return a function that loads a GGUF file with its weights in blocks; None if `model` is not a GGUF file."""
    if split_path(model) is None:
        return None

    def load() -> Any:
        import transformers

        name, options = located(model)
        function = getattr(transformers, auto_class).from_pretrained
        return load_in_blocks(function, name, dtype=torch.float32, **options).eval()

    return load


def model_to_accelerate(eager: nn.Module, blocks: Load | None) -> Any:
    """Return the model to accelerate and compare with `eager`: a copy of it, or what `blocks` loads."""
    return copy.deepcopy(eager) if blocks is None else blocks()


def default_dtypes(model: str | None, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the dtypes to compare: `names`, or only "auto" for a GGUF file, whose blocks are the same for all dtypes."""
    return names if model is None or split_path(model) is None else ("auto",)
