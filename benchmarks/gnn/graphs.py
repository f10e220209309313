"""Synthetic power-law graphs, since nothing may be downloaded: R-MAT (Chakrabarti et al. 2004) with shuffled node numbers."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hf_cpu_accel.runtime.home_folder import home_folder
from hf_cpu_accel.runtime.private_files import make_folder

# Nodes and edges of ogbn-arxiv (made symmetric) and of Reddit with a fifth of its edges, and of a sampled mini-batch.
SIZES = {"arxiv": (169_343, 2_332_486), "reddit": (232_965, 23_000_000), "batch": (20_000, 100_000)}
# Chance of each quadrant of the adjacency matrix.
QUADRANTS = (0.45, 0.22, 0.22, 0.11)


def rmat(nodes: int, edges: int, seed: int = 0) -> Tensor:
    """Return edge_index [2, edges] int64 without self-loops or repeated edges, in random order; cached in a file."""
    file = home_folder() / "benchmarks" / f"rmat_{nodes}_{edges}_{seed}.npy"
    if not file.exists():
        make_folder(file.parent)
        np.save(file, _generate(nodes, edges, np.random.default_rng(seed)))
    return torch.from_numpy(np.load(file)).long()


def _generate(nodes: int, edges: int, rng: np.random.Generator) -> np.ndarray:
    levels = int(np.ceil(np.log2(nodes)))
    first, second, third, _ = np.cumsum(QUADRANTS)
    keys = np.empty(0, np.int64)
    while keys.size < edges:
        count = int((edges - keys.size) * 1.6) + 1000
        source, target = np.zeros(count, np.int64), np.zeros(count, np.int64)
        for _ in range(levels):
            chance = rng.random(count, dtype=np.float32)
            source = source * 2 + (chance >= second)
            target = target * 2 + (((chance >= first) & (chance < second)) | (chance >= third))
        inside = (source < nodes) & (target < nodes) & (source != target)
        keys = np.unique(np.concatenate([keys, target[inside] * nodes + source[inside]]))
    keys = rng.permutation(keys)[:edges]
    number = rng.permutation(nodes)
    return np.stack([number[keys % nodes], number[keys // nodes]]).astype(np.int32)
