"""Linears whose weight is stored quantized, by whom it was loaded, and how it becomes a packed weight without rounding, or with the
least that affine groups allow.

Hosts load such checkpoints into classes of modules or tensors of their own. They are recognized by these classes, which exist only
where the host has been imported: nothing is imported here. Where no host has such a class without a package more, `StoredLinear`
is it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from hf_cpu_accel.checkpoints import bitsandbytes, exported, gguf, hqq, quantize_dynamic, quanto, torchao
from hf_cpu_accel.checkpoints.layout import FloatLayout, IntegerLayout
from hf_cpu_accel.checkpoints.stored_linear import StoredLinear
from hf_cpu_accel.checkpoints.stored_stack import StoredStack
from hf_cpu_accel.checkpoints.stored_weight import StoredWeight, is_stand_in
from hf_cpu_accel.packing import affine
from hf_cpu_accel.packing.affine import AffineGroups
from hf_cpu_accel.packing.four_bits import nearest_form
from hf_cpu_accel.packing.linear import PackedWeight, pack_linear, unpack_linear
from hf_cpu_accel.packing.panels import PANEL_FEATURES, allocate

# A weight is read in pieces: the integers take more memory than their packed form.
_ROWS_AT_ONCE = 32 * PANEL_FEATURES


def stored_weight(module: nn.Module) -> StoredWeight | None:
    """Of a linear that holds a quantized weight; None if `module` is something else."""
    for reader in _READERS:
        found = reader(module)
        if found is not None:
            return found
    return None


def is_stored(module: nn.Module, name: str) -> bool:
    """Whether the parameter `name` of `module` holds a quantized weight, alone or together with others."""
    if name not in module._parameters or (parameter := module._parameters[name]) is None:
        return False
    if isinstance(module, StoredLinear):  # without the order of its inputs, which has to be sorted
        held = tuple(module.tensors.values())
    else:
        weight = stored_weight(module)
        held = () if weight is None else weight.tensors
    return any(parameter is one for one in held)


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


def pack_rounded(
    weights: Sequence[StoredWeight], dtype: str, int4_group: int
) -> tuple[PackedWeight, list[float]]:
    """Weights that no affine groups hold as one packed weight, by `pack_linear`, and how far each of them is off: the length of the
    difference relative to its own."""
    values = [weight.values(0, weight.out_features) for weight in weights if weight.values is not None]
    whole = torch.cat(values)
    packed = pack_linear(whole, nearest_form(whole, dtype, int4_group), int4_group=int4_group)
    found = unpack_linear(packed).split([len(some) for some in values])
    return packed, [
        float((near - some).norm() / some.norm().clamp_min(torch.finfo(torch.float32).tiny))
        for near, some in zip(found, values, strict=True)
    ]


def rounding_error(weight: StoredWeight) -> float:
    """How far what is packed is from `weight`: the length of the difference relative to its own, over its first rows; 0 where it is
    exact."""
    if weight.values is None or weight.rows is None:
        return 0.0
    last = min(weight.out_features, _ROWS_AT_ONCE)
    values = weight.values(0, last)
    length = values.norm().item()
    return (weight.rows(0, last).dequantize() - values).norm().item() / length if length else 0.0


def in_floats(module: nn.Module, name: str, tensor: Tensor, *, with_stored: bool = False) -> Tensor:
    """A parameter or buffer of `module`: where it is a quantized table, or experts of MXFP4, the numbers that its integers stand
    for, else as it is.

    Args:
        name: its path.
        with_stored: whether a quantized weight comes as it is, too.

    Raises:
        ValueError: it is one that nothing has packed.
    """
    if isinstance(tensor, StoredStack):
        return tensor.numbers()
    weight = stored_weight(module)
    if is_stand_in(tensor) or (weight is not None and any(tensor is held for held in weight.tensors)):
        if with_stored:
            return tensor
        form = type(tensor).__name__ if weight is None else weight.form
        raise ValueError(
            f"{name} belongs to a quantized weight that is not packed ({form}), so packed=True cannot write it"
        )
    host = sys.modules.get("transformers.integrations.gguf.utils")
    if tensor.is_floating_point() or host is None or not isinstance(tensor, nn.Parameter):
        return tensor
    if isinstance(module, host.GgufEmbedding):
        table: Tensor = module(torch.arange(module.num_embeddings))
        return table
    if isinstance(module, host.GgufExperts) and not with_stored:
        raise ValueError(
            f"{name} contains blocks of a GGUF file that are not packed, so packed=True cannot write it"
        )
    return tensor


def _pack(weights: Sequence[StoredWeight], bits: int, group: int, *, half: bool) -> PackedWeight:
    out_features, in_features = sum(weight.out_features for weight in weights), weights[0].in_features
    data = allocate(affine.shape_of(out_features, in_features, bits, group, half=half), torch.uint8)
    panel = 0
    for weight in weights:
        for first in range(0, weight.out_features, _ROWS_AT_ONCE):
            assert weight.rows is not None
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
        refusal = f"{name}: codebooks of vectors are not supported"
    elif module.input_permutation is not None:
        refusal = f"{name}: a permuted input is not supported"

    def rows(first: int, last: int) -> AffineGroups:
        return gguf.read_blocks(blocks.detach()[first:last], module.ggml_type)

    bits, group = (form.bits, form.group) if form else (8, 32)
    return StoredWeight(name, module.out_features, module.in_features, bits, group, rows, (blocks,), refusal)


def _stored_linear(module: nn.Module) -> StoredWeight | None:
    """Ours, over the tensors of a checkpoint."""
    if not isinstance(module, StoredLinear):
        return None
    layout, tensors = module.layout, module.tensors
    shape, held = (layout.out_features, layout.in_features), tuple(tensors.values())
    if isinstance(layout, FloatLayout):
        return StoredWeight(layout.form, *shape, 0, 0, None, held, values=partial(layout.values, tensors))
    assert isinstance(layout, IntegerLayout)
    refusal = order = None
    try:
        order = layout.order(tensors)
    except ValueError as error:
        refusal = f"{layout.form}: {error}"
    if layout.packed_group is None:
        refusal = f"{layout.form}: groups of {layout.group} input features are not supported"
    group = layout.packed_group or 0
    rows = partial(layout.rows, tensors, order=order)
    return StoredWeight(layout.form, *shape, layout.packed_bits, group, rows, held, refusal, order)


_READERS: tuple[Callable[[nn.Module], StoredWeight | None], ...] = (
    _gguf_linear,
    _stored_linear,
    bitsandbytes.read,
    hqq.read,
    quanto.read,
    torchao.read,
    quantize_dynamic.read,
    exported.read,
)
