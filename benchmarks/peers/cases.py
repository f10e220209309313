"""What a rival is given: the weights and inputs of a workload, saved by the project's own environment.

A folder per model, `<home>/bench/cases/<model>-<digest>`, as save_pretrained writes it, and in it one per batch with
`inputs.npz`, where the rivals' workers keep their converted models too. The digests are of the weights and of the
inputs themselves, so that nothing stale is ever measured.
"""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
import transformers

from benchmarks import workloads
from hf_cpu_accel.runtime.home import home_folder

_CALIBRATION = 8  # batches of random tokens for static quantisation


def folder(name: str) -> Path:
    """The folder of a workload with `inputs.npz`; its parent holds the model. Made where it is missing."""
    return _folder(name, home_folder() / "bench" / "cases")


@functools.cache  # a table asks once per rival
def _folder(name: str, root: Path) -> Path:
    workload = workloads.parse(name)
    model = workload.build()
    arrays = {key: value.numpy() for key, value in workload.inputs(model).items()}
    calibration = [workload.inputs(model, seed)["input_ids"] for seed in range(1, 1 + _CALIBRATION)]
    arrays["calibration_ids"] = torch.stack(calibration).numpy()
    title, batch = name.split(":")
    weights = _digest(tensor.numpy() for tensor in model.state_dict().values())
    model_folder = root / f"{title}-{weights}"
    case = model_folder / f"{batch}-{_digest(arrays.values())}"
    if not (case / "inputs.npz").exists():
        case.mkdir(parents=True, exist_ok=True)
        transformers.utils.logging.disable_progress_bar()
        model.save_pretrained(model_folder)
        with tempfile.NamedTemporaryFile(dir=case, suffix=".npz", delete=False) as partial:
            np.savez(partial, **arrays)
        os.replace(partial.name, case / "inputs.npz")  # last: an interrupted run leaves no case behind
    return case


def _digest(arrays: Iterable[np.ndarray]) -> str:
    sha = hashlib.sha256()
    for array in arrays:
        sha.update(np.ascontiguousarray(array))
    return sha.hexdigest()[:8]
