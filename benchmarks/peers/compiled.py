"""Rivals inside torch.compile: zentorch's backend, and torchao's int8 through Inductor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.peers.conversion import Inputs
from benchmarks.peers.model import SavedModel


def convert(system: str, case: Path) -> Path:
    """The case itself: nothing is converted ahead."""
    return case


def load(
    system: str, case: Path, inputs: Inputs, threads: int
) -> tuple[Callable[[], Tensor], Callable[[Tensor], np.ndarray]]:
    """(one forward pass, what makes an array of its result)."""
    torch.set_num_threads(threads)
    dtype = torch.bfloat16 if system.endswith("bf16") else torch.float32
    model = SavedModel(case, dtype=dtype)
    if system == "torchao-int8":
        compiled = _torchao(model)
    else:
        import zentorch  # noqa: F401  registers the backend

        compiled = torch.compile(model, backend="zentorch", dynamic=False)
    tensors = [torch.from_numpy(array) for array in inputs.values()]

    def call() -> Tensor:
        with torch.inference_mode():
            return compiled(*tensors)

    return call, lambda output: output.float().numpy()


def _torchao(model: SavedModel) -> Callable[..., Tensor]:
    import torch._inductor.config
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    # Weights are packed for oneDNN only when Inductor freezes them, and it reads no other switch than the global one.
    torch._inductor.config.freezing = True
    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    return torch.compile(model, dynamic=False)
