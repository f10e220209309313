"""OpenVINO: as converted, or with int8 weights and activations (NNCF, static), or int8 weights and dynamic activations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.conversion import Inputs, calibration, converted, inputs

# system -> (converted model, precision of the rest)
_KINDS = {
    "openvino-fp32": ("fp32", "f32"),
    "openvino-bf16": ("fp32", "bf16"),
    "openvino-int8": ("int8", "f32"),
    "openvino-w8dyn": ("w8", "f32"),
}
_ATTENTION = ("ScaledDotProductAttention", "Softmax")  # what models of convolutions alone have none of


def convert(system: str, case: Path) -> Path:
    """Return the file of the system's model."""
    return _model(case, _KINDS[system][0])


def load(
    system: str, model: Path, inputs: Inputs, threads: int
) -> tuple[Callable[[], Any], Callable[[Any], np.ndarray]]:
    """Return (one forward pass, function from its result to an array)."""
    import openvino

    kind, precision = _KINDS[system]
    options = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": "1",
        "INFERENCE_PRECISION_HINT": precision,
    }
    if kind == "w8":
        options["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = "32"
    request = openvino.Core().compile_model(model, "CPU", options).create_infer_request()
    feeds = dict(enumerate(inputs.values()))
    # Without copies in or out: the fastest way that its Python interface offers.
    return lambda: request.infer(feeds, share_inputs=True, share_outputs=True), lambda result: result[0]


def _model(case: Path, kind: str) -> Path:
    import openvino

    name = f"openvino-{openvino.__version__.split('-')[0]}-{kind}"
    source = None if kind == "fp32" else _model(case, "fp32")
    return converted(case, name, partial(_make, kind, source)) / "model.xml"


def _make(kind: str, source: Path | None, case: Path, folder: Path) -> None:
    import openvino

    if source is None:
        model = _from_torch(case)
    else:
        import nncf

        model = openvino.Core().read_model(source)
        if kind == "int8":
            batches = calibration(case)
            samples = nncf.Dataset(batches, lambda batch: list(batch.values()))
            attends = any(node.get_type_name() in _ATTENTION for node in model.get_ops())
            model_type = nncf.ModelType.TRANSFORMER if attends else None
            model = nncf.quantize(model, samples, model_type=model_type, subset_size=len(batches))
        else:
            model = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_ASYM)
    openvino.save_model(model, folder / "model.xml", compress_to_fp16=False)


def _from_torch(case: Path) -> Any:
    import openvino
    import torch

    from benchmarks.peers.model import SavedModel

    example = tuple(torch.from_numpy(array) for array in inputs(case).values())
    with torch.no_grad():
        exported = torch.export.export(SavedModel(case), example)
    model = openvino.convert_model(exported)
    # The exporter's shapes come out dynamic, which would cost OpenVINO some of its fusions.
    model.reshape({port: tensor.shape for port, tensor in zip(model.inputs, example, strict=True)})
    return model
