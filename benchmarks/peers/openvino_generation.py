"""Text generation by OpenVINO: optimum-intel's export with a stateful cache, weights compressed by NNCF, a plain greedy loop."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.conversion import converted

# system -> (bits of the weights, precision of the rest, the nearest dtype of this package)
_KINDS: dict[str, tuple[int, str, str]] = {
    "openvino-bf16": (16, "bf16", "bfloat16"),
    "openvino-int8": (8, "f32", "int8"),
    "openvino-int4": (4, "f32", "int4"),
}


def convert(system: str, case: Path) -> Path:
    """Return the file of the system's model."""
    import openvino

    bits = _KINDS[system][0]
    name = f"openvino-{openvino.__version__.split('-')[0]}-{bits}"
    return converted(case, name, partial(_export, bits)) / "openvino_model.xml"


def load(
    system: str, model: Path, prompt: int, new: int, threads: int
) -> tuple[Callable[[], tuple[float, list[float]]], dict[str, Any]]:
    """Return (function that writes one text, facts).

    Int8 and int4 weights meet activations that OpenVINO quantizes at run time, as it does by default.
    """
    import openvino

    _, precision, dtype = _KINDS[system]
    options = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": "1",
        "INFERENCE_PRECISION_HINT": precision,
    }
    compiled = openvino.Core().compile_model(model, "CPU", options)
    request = compiled.create_infer_request()
    inputs = {name for port in compiled.inputs for name in port.names}
    vocabulary = json.loads((model.parent / "config.json").read_text())["vocab_size"]
    ids = np.random.default_rng(0).integers(0, vocabulary, (1, prompt))

    def step(tokens: np.ndarray, past: int) -> np.ndarray:
        length = tokens.shape[1]
        feeds = {"input_ids": tokens, "attention_mask": np.ones((1, past + length), np.int64)}
        if "position_ids" in inputs:
            feeds["position_ids"] = np.arange(past, past + length)[None]
        if "beam_idx" in inputs:
            feeds["beam_idx"] = np.zeros(1, np.int32)
        request.infer(feeds, share_inputs=True, share_outputs=True)
        return request.get_output_tensor(0).data[:, -1:].argmax(-1)

    def write() -> tuple[float, list[float]]:
        request.reset_state()
        times = [time.perf_counter()]
        tokens = step(ids, 0)
        times.append(time.perf_counter())
        for past in range(prompt, prompt + new - 1):
            tokens = step(tokens, past)
            times.append(time.perf_counter())
        first, *steps = np.diff(times).tolist()
        return first, steps

    return write, {"dtype": dtype, "step_bytes": model.with_suffix(".bin").stat().st_size}


def _export(bits: int, case: Path, folder: Path) -> None:
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

    options: dict[str, Any] = {"load_in_8bit": False}
    if bits == 8:
        options = {"quantization_config": OVWeightQuantizationConfig(bits=8, sym=False)}
    if bits == 4:  # the head and the table of embeddings stay int8, as is its default
        config = OVWeightQuantizationConfig(bits=4, sym=True, group_size=32, ratio=1.0)
        options = {"quantization_config": config}
    model = OVModelForCausalLM.from_pretrained(case / "model", export=True, compile=False, **options)
    model.save_pretrained(folder)
