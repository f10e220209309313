"""The progress bar of packing, for models that take more than a few seconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn
from tqdm import tqdm

from hf_cpu_accel.hosts.progress import shows_progress

DELAY = 3.0  # seconds before it is shown


def with_progress(modules: Sequence[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the (path, module) pairs of a model, while a progress bar counts the bytes of their weights."""
    sizes = [sum(p.nbytes for p in module.parameters(recurse=False)) for _, module in modules]
    shown = shows_progress()
    with tqdm(
        total=sum(sizes),
        desc="Packing weights",
        unit="B",
        unit_scale=True,
        delay=DELAY,
        disable=None if shown is None else not shown,
    ) as bar:
        for module, size in zip(modules, sizes, strict=True):
            yield module
            bar.update(size)
