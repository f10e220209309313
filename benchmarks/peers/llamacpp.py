"""Text generation by llama.cpp, timed by its own `llama-bench` on models of its own converter and quantizer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peers.build_llamacpp import program, sources
from benchmarks.peers.conversion import converted

# system -> (its name for the format, the nearest dtype of this package)
_KINDS = {
    "llamacpp-bf16": ("BF16", "bfloat16"),
    "llamacpp-q8_0": ("Q8_0", "int8"),
    "llamacpp-q4_0": ("Q4_0", "int4"),
    "llamacpp-q4_k_m": ("Q4_K_M", "int4"),
}


def convert(system: str, case: Path) -> Path:
    """Return the file of the system's model."""
    kind = _KINDS[system][0]
    whole = converted(case, "llamacpp-BF16", _write_gguf) / "model.gguf"
    if kind == "BF16":
        return whole
    return converted(case, f"llamacpp-{kind}", partial(_quantize, kind, whole)) / "model.gguf"


def load(
    system: str, model: Path, prompt: int, new: int, threads: int
) -> tuple[Callable[[], tuple[float, list[float]]], dict[str, Any]]:
    """Return (function that writes one text, facts). Its programs load the model for each text; the times exclude that."""

    def write() -> tuple[float, list[float]]:
        first = _bench(model, threads, "-p", str(prompt), "-n", "0")
        # Behind a prompt as long, so that the cache is read at the same lengths.
        steps = _bench(model, threads, "-p", "0", "-n", str(new - 1), "-d", str(prompt))
        return first["samples_ns"][0] / 1e9, [steps["samples_ns"][0] / 1e9 / (new - 1)] * (new - 1)

    size = _bench(model, threads, "-p", "1", "-n", "0")["model_size"]
    return write, {"dtype": _KINDS[system][1], "step_bytes": size}


def _bench(model: Path, threads: int, *arguments: str) -> dict[str, Any]:
    command = [str(program(_folder(), "llama-bench")), "-m", str(model), "-t", str(threads), "-r", "1"]
    done = subprocess.run([*command, *arguments, "-o", "jsonl"], capture_output=True, text=True, check=False)
    rows = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or len(rows) != 1:
        raise RuntimeError(f"llama-bench ended with code {done.returncode}: {done.stderr[-500:]}")
    row: dict[str, Any] = json.loads(rows[0])
    return row


def _write_gguf(case: Path, folder: Path) -> None:
    """Write the weights alone: the checkpoints of the cases have no tokenizer, and none is needed for speed."""
    source = sources(_folder())
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    import gguf
    import torch
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

    parameters = ModelBase.load_hparams(case / "model", False)
    converter = get_model_class(get_model_architecture(parameters, ModelType.TEXT), mmproj=False)

    def no_vocabulary(self: Any) -> None:
        self._set_vocab_none()
        self.gguf_writer.add_vocab_size(self.hparams["vocab_size"])

    converter.set_vocab = no_vocabulary
    converter.no_mtp = True  # layers that guess further tokens, which transformers does not load
    with torch.inference_mode():
        kind = gguf.LlamaFileType.MOSTLY_BF16
        model = converter(case / "model", kind, folder / "model.gguf", hparams=_as_published(parameters))
        model.hparams.setdefault("n_ctx", model.hparams.get("n_positions", 1024))
        model.write()


def _as_published(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return config.json as the converter reads it: transformers 5.24 names Granite's layers otherwise than the published file."""
    if parameters.get("model_type") != "granitemoehybrid":
        return parameters
    names = {"full_attention": "attention", "linear_attention": "mamba"}
    return {**parameters, "layer_types": [names.get(name, name) for name in parameters["layer_types"]]}


def _quantize(kind: str, whole: Path, case: Path, folder: Path) -> None:
    command = [str(program(_folder(), "llama-quantize")), str(whole), str(folder / "model.gguf"), kind]
    subprocess.run(command, stdout=sys.stderr, check=True)


def _folder() -> Path:
    return Path(os.environ["PEER_FOLDER"])
