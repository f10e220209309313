"""Linears whose weight is stored quantised, by whom it was loaded, and how it becomes a packed weight without rounding.

Hosts load such checkpoints into module classes of their own. They are recognised by these classes, which exist only where the
host has been imported: nothing is imported here.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_cpu_accel.checkpoints import gguf
from hf_cpu_accel.packing import affine
from hf_cpu_accel.packing.affine import AffineGroups
from hf_cpu_accel.packing.linear import PackedWeight
from hf_cpu_accel.packing.panels import PANEL_FEATURES, allocate

# A weight is read in pieces: the integers take more memory than their packed form.
_ROWS_AT_ONCE = 32 * PANEL_FEATURES


@dataclass(frozen=True)
class StoredWeight:
    """The weight of a linear as its checkpoint has it.

    Attributes:
        form: its name, such as "GGUF Q4_1".
        bits, group: of the affine groups that hold it exactly.
        rows: (first, last) -> these output features.
        tensors: names of the parameters of the module that hold it.
        refusal: why it cannot be packed, or None.
    """

    form: str
    out_features: int
    in_features: int
    bits: int
    group: int
    rows: Callable[[int, int], AffineGroups]
    tensors: tuple[str, ...]
    refusal: str | None = None


def stored_weight(module: nn.Module) -> StoredWeight | None:
    """Of a linear that holds a quantised weight; None if `module` is something else."""
    for reader in _READERS:
        found = reader(module)
        if found is not None:
            return found
    return None


def pack_stored(weights: Sequence[StoredWeight]) -> PackedWeight:
    """Weights with the same in_features as one packed weight, the output features of each behind those of the one before.

    Where they differ in bits or groups, all are written in the finest of them. All but the last have a multiple of 32 output
    features.
    """
    bits = max(weight.bits for weight in weights)
    group = math.gcd(*(weight.group for weight in weights))
    try:
        return _pack(weights, bits, group, half=True)
    except affine.NotHalfError:
        return _pack(weights, bits, group, half=False)


def in_floats(module: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """A parameter or buffer of `module` that holds integers: the numbers that they stand for where it is a quantised table, else
    as it is.

    Raises:
        ValueError: it is a quantised weight that nothing has packed; `name` is its path.
    """
    host = sys.modules.get("transformers.integrations.gguf.utils")
    if host is None or not isinstance(tensor, nn.Parameter):
        return tensor
    if isinstance(module, host.GgufEmbedding):
        table: Tensor = module(torch.arange(module.num_embeddings))
        return table
    if isinstance(module, host.GgufLinear | host.GgufExperts):
        raise ValueError(
            f"{name} holds blocks of a GGUF file that are not packed, so it cannot be written packed"
        )
    return tensor


def _pack(weights: Sequence[StoredWeight], bits: int, group: int, *, half: bool) -> PackedWeight:
    out_features, in_features = sum(weight.out_features for weight in weights), weights[0].in_features
    data = allocate(affine.shape_of(out_features, in_features, bits, group, half=half), torch.uint8)
    panel = 0
    for weight in weights:
        for first in range(0, weight.out_features, _ROWS_AT_ONCE):
            rows = weight.rows(first, min(first + _ROWS_AT_ONCE, weight.out_features)).regroup(bits, group)
            packed = affine.pack(rows, half=half)
            data[panel : panel + len(packed)] = packed
            panel += len(packed)
    return PackedWeight(data, None, in_features, out_features, f"affine{bits}")


def _gguf_linear(module: nn.Module) -> StoredWeight | None:
    """transformers' linear over the blocks of a GGUF file."""
    host = sys.modules.get("transformers.integrations.gguf.utils")
    if host is None or not isinstance(module, host.GgufLinear):
        return None
    blocks: Tensor = module.weight
    form = gguf.FORMATS.get(module.ggml_type)
    name = f"GGUF {form.name if form else module.ggml_type}"
    refusal = None
    if form is None:
        refusal = f"{name}: its levels are vectors, which affine groups cannot hold"
    elif module.input_permutation is not None:
        refusal = f"{name}: its input is permuted"

    def rows(first: int, last: int) -> AffineGroups:
        return gguf.read_blocks(blocks.detach()[first:last], module.ggml_type)

    bits, group = (form.bits, form.group) if form else (8, 32)
    return StoredWeight(
        name, module.out_features, module.in_features, bits, group, rows, ("weight",), refusal
    )


_READERS: tuple[Callable[[nn.Module], StoredWeight | None], ...] = (_gguf_linear,)
