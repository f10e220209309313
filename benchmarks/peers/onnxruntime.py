"""ONNX Runtime: the graph of torch's exporter, fused by its transformer optimizer; int8 is its dynamic quantization."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.conversion import Inputs, converted, inputs


def convert(system: str, case: Path) -> Path:
    """Return the file of the system's model."""
    import onnxruntime

    name = f"onnxruntime-{onnxruntime.__version__}"
    fused = converted(case, f"{name}-fp32", _fuse) / "model.onnx"
    if system == "onnxruntime-fp32":
        return fused
    return converted(case, f"{name}-int8", partial(_quantize, fused)) / "model.onnx"


def load(
    system: str, model: Path, inputs: Inputs, threads: int
) -> tuple[Callable[[], Any], Callable[[Any], np.ndarray]]:
    """Return (one forward pass, function from its result to an array)."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    wanted = {node.name for node in session.get_inputs()}  # the optimizer may have dropped an input
    feeds = {name: array for name, array in inputs.items() if name in wanted}
    return lambda: session.run(None, feeds), lambda result: result[0]


def _fuse(case: Path, folder: Path) -> None:
    import torch
    from onnxruntime.transformers import optimizer

    from benchmarks.peers.model import SavedModel

    # The optimizer's patterns are those of eager attention as torch's first exporter writes it.
    model = SavedModel(case, attn_implementation="eager")
    example = {name: torch.from_numpy(array) for name, array in inputs(case).items()}
    names = list(example)
    raw = str(folder / "model.onnx")
    with torch.no_grad():
        torch.onnx.export(
            model, tuple(example.values()), raw, input_names=names, output_names=["output"], dynamo=False
        )
    config = model.model.config
    fused = optimizer.optimize_model(
        raw,
        model_type="bert",  # the one for every encoder
        num_heads=config.num_attention_heads,
        hidden_size=config.hidden_size,
        opt_level=1,
    )
    print("fused:", fused.get_fused_operator_statistics(), file=sys.stderr)
    fused.save_model_to_file(raw)


def _quantize(fused: Path, case: Path, folder: Path) -> None:
    from onnx import TensorProto
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(
        fused,
        folder / "model.onnx",
        weight_type=QuantType.QInt8,
        per_channel=True,
        extra_options={"DefaultTensorType": TensorProto.FLOAT},  # ONNX infers no type behind a fused operator
    )
