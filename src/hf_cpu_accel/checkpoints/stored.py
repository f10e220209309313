"""Reading of linears with a quantized weight, and packing them exactly, or with the smallest error of affine groups.

Host libraries load quantized checkpoints into their own classes of modules or tensors. These classes are looked up in
`sys.modules`, so nothing is imported. `StoredLinear` is for formats that otherwise need another package.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from hf_cpu_accel.checkpoints import bitsandbytes, exported, gguf, hqq, quantize_dynamic, quanto, torchao
from hf_cpu_accel.checkpoints.layout import FloatLayout, IntegerLayout
from hf_cpu_accel.checkpoints.stored_linear import StoredLinear
from hf_cpu_accel.checkpoints.stored_stack import StoredStack
from hf_cpu_accel.checkpoints.stored_weight import StoredWeight, is_stand_in, plain_tensors
from hf_cpu_accel.packing import affine
from hf_cpu_accel.packing.affine import AffineGroups
from hf_cpu_accel.packing.four_bits import nearest_form
from hf_cpu_accel.packing.linear import PackedWeight, pack_linear, unpack_linear
from hf_cpu_accel.packing.panels import PANEL_FEATURES, allocate
from hf_cpu_accel.runtime.mapped_files import MappedFiles

# A weight is read in pieces, because its integers take more memory than the packed form.
_ROWS_AT_ONCE = 32 * PANEL_FEATURES


def stored_weight(module: nn.Module) -> StoredWeight | None:
    """Return the quantized weight of a linear; None for other modules."""
    for reader in _READERS:
        weight = reader(module)
        if weight is not None:
            return weight
    return None


def is_stored(module: nn.Module, name: str) -> bool:
    """Return whether the parameter `name` of `module` is a quantized weight or a part of it."""
    if name not in module._parameters or (parameter := module._parameters[name]) is None:
        return False
    if isinstance(module, StoredLinear):  # without `stored_weight`, which sorts the order of the inputs
        tensors = tuple(module.tensors.values())
    else:
        weight = stored_weight(module)
        tensors = () if weight is None else weight.tensors
    return any(parameter is tensor for tensor in tensors)


def plain_weights(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (path, plain tensor) of each parameter of a model, without the integers of quantized weights.

    Some libraries store integers with a floating-point dtype. After each tensor, the pages of a mapped checkpoint are dropped, so
    it is never in memory as a whole.
    """
    weights = filter(None, map(stored_weight, root.modules()))
    integers = {id(tensor) for weight in weights for tensor in weight.tensors}
    mapped = MappedFiles()
    for path, parameter in root.named_parameters():
        for tensor in plain_tensors(parameter):
            if id(tensor) not in integers:
                yield path, tensor
            mapped.give_back(tensor)


def pack_stored(weights: Sequence[StoredWeight]) -> PackedWeight:
    """Pack weights with the same in_features as one packed weight, with concatenated output features.

    If they differ in bits or groups, the result has the finest of them. All but the last must have a multiple of 32 output
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
    """Pack weights that affine groups cannot represent as one packed weight, by `pack_linear`.

    Returns:
        The packed weight, and the error of each weight: the norm of the difference relative to the norm of the weight.
    """
    values = [weight.values(0, weight.out_features) for weight in weights if weight.values is not None]
    joined = torch.cat(values)
    packed = pack_linear(joined, nearest_form(joined, dtype, int4_group), int4_group=int4_group)
    rounded = unpack_linear(packed).split([len(exact) for exact in values])
    return packed, [
        float((near - exact).norm() / exact.norm().clamp_min(torch.finfo(torch.float32).tiny))
        for near, exact in zip(rounded, values, strict=True)
    ]


def rounding_error(weight: StoredWeight) -> float:
    """Return the error of packing `weight`: the norm of the difference relative to its own, over its first rows; 0 if exact."""
    if weight.values is None or weight.rows is None:
        return 0.0
    last = min(weight.out_features, _ROWS_AT_ONCE)
    values = weight.values(0, last)
    length = values.norm().item()
    return (weight.rows(0, last).dequantize() - values).norm().item() / length if length else 0.0


def in_floats(module: nn.Module, name: str, tensor: Tensor, *, with_stored: bool = False) -> Tensor:
    """Return a parameter or buffer of `module`, dequantized if it is a quantized table or experts of MXFP4.

    Args:
        name: its path.
        tensor: the parameter or buffer.
        with_stored: return a quantized weight unchanged instead of raising.

    Raises:
        ValueError: it is a quantized weight that is not packed.
    """
    if isinstance(tensor, StoredStack):
        return tensor.numbers()
    weight = stored_weight(module)
    if is_stand_in(tensor) or (weight is not None and any(tensor is part for part in weight.tensors)):
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
    """Read transformers' linear over the blocks of a GGUF file."""
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
    """Read a `StoredLinear`."""
    if not isinstance(module, StoredLinear):
        return None
    layout, tensors = module.layout, module.tensors
    shape, parts = (layout.out_features, layout.in_features), tuple(tensors.values())
    if isinstance(layout, FloatLayout):
        return StoredWeight(layout.form, *shape, 0, 0, None, parts, values=partial(layout.values, tensors))
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
    return StoredWeight(layout.form, *shape, layout.packed_bits, group, rows, parts, refusal, order)


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
