"""The language models that are measured, as checkpoints on disk: every system, rivals too, loads the same one.

A folder per model, `<home>/bench/generation/<title>-<digest>`; `model` in it is the checkpoint in bfloat16, and the rivals'
workers keep their converted models beside it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

import torch

from hf_cpu_accel.cli import random_models
from hf_cpu_accel.cli.bench.generation_workload import auto_class
from hf_cpu_accel.runtime.home_folder import home_folder
from hf_cpu_accel.runtime.private_files import make_folder


def folder(name: str) -> Path:
    """Return the case of a well-known shape with random weights, or of a checkpoint folder. Create a missing one.

    Raises ValueError if `name` is neither.
    """
    root = home_folder() / "bench" / "generation"
    if not os.path.isdir(name):
        config = random_models.config(name)
        case = root / f"{name}-{_digest(config.to_json_string())}"
        if not (case / "model").exists():
            make_folder(case)
            _save(name, case)
        return case
    source = Path(name).resolve()
    files = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in source.iterdir())
    case = root / f"{source.name}-{_digest(f'{source} {files}')}"
    make_folder(case)
    if not (case / "model").exists():
        (case / "model").symlink_to(source)
    return case


def title(name: str) -> str:
    """Return the model's name in tables."""
    return Path(name).resolve().name if os.path.isdir(name) else name


def _save(name: str, case: Path) -> None:
    partial = tempfile.mkdtemp(dir=case, prefix="partial-")
    try:
        head = auto_class(random_models.config(name), name)
        random_models.build(name, head, dtype=torch.bfloat16).save_pretrained(partial)
        os.rename(partial, case / "model")
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
