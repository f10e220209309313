"""Rivals inside torch.compile: zentorch's backend, and torchao's int8 and PT2E through Inductor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.peers.conversion import Inputs
from benchmarks.peers.model import SavedModel


def convert(system: str, case: Path) -> Path:
    """Return the case itself: nothing is converted ahead."""
    return case


def load(
    system: str, case: Path, inputs: Inputs, threads: int
) -> tuple[Callable[[], Tensor], Callable[[Tensor], np.ndarray]]:
    """Return (one forward pass, function from its result to an array)."""
    torch.set_num_threads(threads)
    dtype = torch.bfloat16 if system.endswith("bf16") else torch.float32
    model = SavedModel(case, dtype=dtype)
    tensors = [torch.from_numpy(array) for array in inputs.values()]
    if system == "torchao-int8":
        compiled = _torchao(model)
    elif system == "pt2e-int8":
        compiled = _pt2e(model, tensors)
    else:
        import zentorch  # noqa: F401  registers the backend

        compiled = torch.compile(model, backend="zentorch", dynamic=False)

    def call() -> Tensor:
        with torch.no_grad():  # in inference mode PT2E's graphs do not compile
            return compiled(*tensors)

    return call, lambda output: output.float().numpy()


def _torchao(model: SavedModel) -> Callable[..., Tensor]:
    import torch._inductor.config
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    # Weights are packed for oneDNN only when Inductor freezes them, and it reads no other switch than the global one.
    torch._inductor.config.freezing = True
    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    return torch.compile(model, dynamic=False)


def _pt2e(model: SavedModel, tensors: list[Tensor]) -> Callable[..., Tensor]:
    """Quantize to static 8 bits for x86, calibrated with the input itself."""
    import torch._inductor.config
    from torchao.quantization.pt2e import move_exported_model_to_eval
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    torch._inductor.config.freezing = True
    with torch.no_grad():
        exported = torch.export.export(model, tuple(tensors)).module()
        exported.graph.eliminate_dead_code()  # the quantizer stumbles over a pooler that is not read
        exported.recompile()
        quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
        prepared = prepare_pt2e(exported, quantizer)
        prepared(*tensors)
        converted = move_exported_model_to_eval(convert_pt2e(prepared))
        return torch.compile(converted, dynamic=False)
