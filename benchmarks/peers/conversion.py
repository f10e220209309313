"""Convert models once, in a separate process, and save them beside the case's inputs."""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

Inputs = dict[str, np.ndarray]  # in the order in which converted models take them


def converted(case: Path, name: str, make: Callable[[Path, Path], None]) -> Path:
    """Return the folder `name` of the case. `make(case, folder)` fills a missing one.

    `make` runs in another process: its memory is not the measured system's. It must be a module's function, or a
    partial of one; its errors are raised here.
    """
    done = case / name
    if not done.exists():
        partial = Path(tempfile.mkdtemp(dir=case, prefix=f"{name}-partial-"))
        try:
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                pool.submit(make, case, partial).result()
            partial.rename(done)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return done


def inputs(case: Path) -> Inputs:
    """Return the batch that is measured."""
    with np.load(case / "inputs.npz") as arrays:
        return dict(arrays)


def calibration(case: Path) -> list[Inputs]:
    """Return batches of the same shapes, and for text of the same mask, with other random values."""
    with np.load(case / "calibration.npz") as arrays:
        stacked = dict(arrays)
    return [dict(zip(stacked, batch, strict=True)) for batch in zip(*stacked.values(), strict=True)]
