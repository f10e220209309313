"""Weights and inputs of a workload for the rivals, saved by the project's own environment.

A folder per model, `<home>/bench/cases/<model>-<digest>`, as save_pretrained writes it, and in it one per batch with
`inputs.npz` and `calibration.npz`, where the rivals' workers keep their converted models too. The digests are of the
weights and of the inputs themselves, so that nothing stale is ever measured.
"""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import torch
import transformers

from benchmarks import workloads
from hf_cpu_accel.runtime.home_folder import home_folder
from hf_cpu_accel.runtime.private_files import make_folder


def folder(name: str) -> Path:
    """Return the folder of a workload with the inputs; its parent has the model. Create a missing one."""
    return _folder(name, home_folder() / "bench" / "cases")


@functools.cache  # a table asks once per rival
def _folder(name: str, root: Path) -> Path:
    workload = workloads.parse(name)
    model = workload.build()
    measured = _arrays(workload.inputs(model))
    others = [_arrays(batch) for batch in workloads.examples(workload, model)]
    calibration = {key: np.stack([inputs[key] for inputs in others]) for key in measured}
    title, batch = name.split(":")
    weights = _digest(tensor.numpy() for tensor in model.state_dict().values())
    model_folder = root / f"{title}-{weights}"
    case = model_folder / f"{batch}-{_digest([*measured.values(), *calibration.values()])}"
    if not (case / "calibration.npz").exists():
        make_folder(case)
        transformers.utils.logging.disable_progress_bar()
        model.save_pretrained(model_folder)
        (model_folder / "class.txt").write_text(f"{type(model).__module__} {type(model).__qualname__}")
        _save(measured, case / "inputs.npz")
        _save(calibration, case / "calibration.npz")  # last: an interrupted run leaves no case behind
    return case


def _arrays(inputs: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in inputs.items()}


def _save(arrays: Mapping[str, np.ndarray], path: Path) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".npz", delete=False) as partial:
        np.savez(partial, **arrays)
    os.replace(partial.name, path)


def _digest(arrays: Iterable[np.ndarray]) -> str:
    sha = hashlib.sha256()
    for array in arrays:
        sha.update(np.ascontiguousarray(array))
    return sha.hexdigest()[:8]
