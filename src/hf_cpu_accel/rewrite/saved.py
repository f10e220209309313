"""Collect the tensors of an accelerated model that are saved: packed weights, and the other parameters and buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.checkpoints.stored import in_floats, stored_weight
from hf_cpu_accel.checkpoints.stored_stack import LinearsStack
from hf_cpu_accel.packing.linear import PackedWeight
from hf_cpu_accel.packing.saved_weight import SavedWeight
from hf_cpu_accel.patching.restore import FreedWeight, Journal, SharedValues, SwappedModule
from hf_cpu_accel.rewrite.attention.multihead import WEIGHT, PackedMultiheadAttention
from hf_cpu_accel.rewrite.convolution.gemm import GemmConvolution
from hf_cpu_accel.rewrite.convolution.image_of_time import ConvolutionOverTime
from hf_cpu_accel.rewrite.convolution.match import OneDNNConvolution
from hf_cpu_accel.rewrite.convolution.transposed.images import TransposedImages
from hf_cpu_accel.rewrite.core.float16 import cast_as_outside
from hf_cpu_accel.rewrite.core.packed_module import PackedModule
from hf_cpu_accel.rewrite.experts.layer import PackedExperts, PackedStack
from hf_cpu_accel.rewrite.experts.match import ExpertsRule
from hf_cpu_accel.rewrite.linear.layer import PackedLinear
from hf_cpu_accel.rewrite.linear.match import LinearRule, MergedProjectionsRule


def saved_weights(root: nn.Module) -> list[SavedWeight]:
    """Return the packed weights in the modules of `root`."""
    groups: dict[int, list[tuple[int, str, PackedLinear]]] = {}
    found: list[SavedWeight] = []
    for path, module in root.named_modules():
        if isinstance(module, PackedModule) and module.is_computed:
            continue  # the sources of its weight are saved, and packed again
        if isinstance(module, PackedLinear):
            groups.setdefault(id(module.group), []).append((module.index, _join(path, "weight"), module))
        elif isinstance(module, PackedModule):
            found.append(_of_convolution(module, _join(path, "weight")))
        elif isinstance(module, PackedExperts):
            found.extend(
                SavedWeight(ExpertsRule.name, (_join(path, name),), packed)
                for name, packed in module.packed.items()
            )
        elif isinstance(module, PackedMultiheadAttention):
            whole, path = module.group, _join(path, WEIGHT)
            found.append(SavedWeight(module.rule, (path,), whole.packed, None, whole.permutation))
    for members in groups.values():
        members.sort(key=lambda member: member[0])
        first = members[0][2]
        paths = tuple(path for _, path, _ in members)
        # Quantized weights of a checkpoint have their own rule, and are in plain linears after loading.
        rule = first.rule or (MergedProjectionsRule.name if len(members) > 1 else LinearRule.name)
        group = first.group
        found.append(
            SavedWeight(rule, paths, group.in_own_order(), getattr(first, "_lost", None), group.permutation)
        )
    return found


def plain_tensors(
    root: nn.Module, packed: set[str], tied: Mapping[str, str], *, with_stored: bool = False
) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers of `root` by path, as in its state dict.

    Args:
        packed: the paths of the parameters that are packed; a parameter that is kept beside its packed weight is left out, too.
        tied: {path: path of the same parameter elsewhere}; the first is left out.
        with_stored: whether to include quantized weights that are not packed.

    Raises:
        ValueError: there is a quantized weight that is not packed, and `with_stored` is False.
    """
    tensors: dict[str, Tensor] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        for name, tensor in _persistent_tensors(module):
            whole = _join(path, name)
            if tensor is not None and whole not in packed:
                tensors[whole] = in_floats(module, whole, tensor, with_stored=with_stored)
    return {name: tensor for name, tensor in tensors.items() if tied.get(name) not in tensors}


def original_state(root: nn.Module, journal: Journal) -> dict[str, Tensor]:
    """Return the state dict of `root` before it was accelerated, except that names may come in another order.

    Raises:
        RuntimeError: some of the original weights are gone.
    """
    journal.check()
    # Not as parameters, which torchao's serialization does not support.
    plain = plain_tensors(root, set(), {}, with_stored=True)
    state = {name: tensor.detach() for name, tensor in plain.items()}
    state.update(_stored_state(root, journal))
    freed: dict[tuple[int, str], Tensor] = {}
    for change in journal.changes:
        if not isinstance(change, FreedWeight) or _is_of_linears(change):
            continue
        packed: Any = change.packed
        if isinstance(packed, PackedStack):  # what its checkpoint stores is packed without rounding
            freed[id(packed.module), packed.stack.name] = (
                change.values() if change.is_cast else packed.unpack()
            )
        elif change.is_cast:
            name = WEIGHT if isinstance(packed, PackedMultiheadAttention) else "weight"
            freed[id(packed), name] = change.values()
    for path, module in root.named_modules(remove_duplicate=False):
        if isinstance(module, PackedMultiheadAttention) and module.kept is not None:
            state[_join(path, WEIGHT)] = module.kept.detach()
        if isinstance(module, PackedModule | PackedExperts | PackedMultiheadAttention):
            names = [name for owner, name in freed if owner == id(module)]
            state.update({_join(path, name): freed[id(module), name] for name in names})
    cast_as_outside(state, journal)
    return state


def _has_linears(module: nn.Module) -> bool:
    """Return whether the module has experts that are saved as the separate linears of their file."""
    return any(isinstance(parameter, LinearsStack) for parameter in module.parameters(recurse=False))


def _is_of_linears(change: FreedWeight) -> bool:
    """Return whether the change is of a tensor of experts that are saved as linears."""
    packed: Any = change.packed
    return isinstance(packed, PackedStack) and packed.is_of_linears


def _stored_state(root: nn.Module, journal: Journal) -> dict[str, Tensor]:
    """Return the entries of the linears that were packed from quantized weights, as their hosts save them."""
    freed: list[tuple[SharedValues | FreedWeight, Tensor]] = []
    for change in journal.changes:
        if isinstance(change, SharedValues):
            freed.append((change, change.tensor))
        elif (
            isinstance(change, FreedWeight)
            and not change.is_cast
            and (isinstance(change.packed, PackedLinear) or _is_of_linears(change))
        ):
            freed.append((change, change.parameter))
    swaps = [change for change in journal.changes if isinstance(change, SwappedModule)]
    replacements = {id(change.original): change.parent._modules[change.name] for change in swaps}

    def now(module: nn.Module) -> nn.Module:
        """Return the module that replaces `module`, whose children were replaced before itself."""
        replacement = replacements.get(id(module))
        return module if replacement is None else now(replacement)

    slots = {(id(now(change.parent)), change.name): change.original for change in swaps}
    state: dict[str, Tensor] = {}
    try:
        for release, _ in reversed(freed):
            release.undo()
        stored = {
            slot: original
            for slot, original in slots.items()
            if stored_weight(original) is not None or _has_linears(original)
        }
        for path, module in root.named_modules(remove_duplicate=False):
            for name in module._modules:
                if (id(module), name) in stored:
                    stored[id(module), name].state_dict(destination=state, prefix=f"{_join(path, name)}.")
    finally:
        for _, tensor in freed:
            tensor.data = torch.empty(0, dtype=tensor.dtype)
    return state


def _of_convolution(module: PackedModule, path: str) -> SavedWeight:
    lost: Any = getattr(module, "_lost", None)
    own = isinstance(module, GemmConvolution | TransposedImages | ConvolutionOverTime)
    if own and isinstance(module.packed, PackedWeight):
        return SavedWeight(module.rule, (path,), module.packed, lost)
    assert isinstance(module, OneDNNConvolution | ConvolutionOverTime)
    assert isinstance(module.packed, Tensor)
    plain = module.packed.to_dense().contiguous()
    packed = PackedWeight(plain, None, plain[0].numel(), len(plain), module.packed_dtype)
    return SavedWeight(module.rule, (path,), packed, lost)


def _persistent_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor | None]]:
    yield from module._parameters.items()
    for name, buffer in module._buffers.items():
        if name not in module._non_persistent_buffers_set:
            yield name, buffer


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
