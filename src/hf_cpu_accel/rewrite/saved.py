"""Collect the tensors of an accelerated model that are saved: packed weights, and the other parameters and buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import itemgetter

import torch
from torch import Tensor, nn

from hf_cpu_accel.checkpoints.stored import in_floats, stored_weight
from hf_cpu_accel.checkpoints.stored_stack import LinearsStack
from hf_cpu_accel.packing.saved_weight import SavedWeight
from hf_cpu_accel.patching.accelerated_module import AcceleratedModule, SavedParameter
from hf_cpu_accel.patching.restore import FreedWeight, Journal, SharedValues, SwappedModule
from hf_cpu_accel.rewrite.core.float16 import cast_as_outside


def saved_weights(root: nn.Module) -> list[SavedWeight]:
    """Return the packed weights in the modules of `root`."""
    groups: dict[int, list[tuple[int, str, SavedParameter]]] = {}
    for path, module in root.named_modules():
        for part in module.saved_parameters() if isinstance(module, AcceleratedModule) else ():
            groups.setdefault(id(part.group), []).append((part.index, _join(path, part.name), part))
    found = []
    for members in groups.values():
        members.sort(key=itemgetter(0))
        found.append(members[0][2].weight(tuple(path for _, path, _ in members)))
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
    freed: dict[int, dict[str, Tensor]] = {}
    for change in journal.changes:
        if isinstance(change, FreedWeight) and not change.is_of_linears:
            module, name = change.packed.parameter_place()
            # A stack of quantized experts is packed without rounding.
            values = change.values() if change.is_cast else change.packed.unpack()
            freed.setdefault(id(module), {})[name] = values
    for path, module in root.named_modules(remove_duplicate=False):
        state.update({_join(path, name): values for name, values in freed.get(id(module), {}).items()})
    cast_as_outside(state, journal)
    return state


def _has_linears(module: nn.Module) -> bool:
    """Return whether the module has experts that are saved as the separate linears of their file."""
    return any(isinstance(parameter, LinearsStack) for parameter in module.parameters(recurse=False))


def _stored_state(root: nn.Module, journal: Journal) -> dict[str, Tensor]:
    """Return the entries of the linears that were packed from quantized weights, as their hosts save them."""
    freed: list[tuple[SharedValues | FreedWeight, Tensor]] = []
    for change in journal.changes:
        if isinstance(change, SharedValues):
            freed.append((change, change.tensor))
        elif isinstance(change, FreedWeight) and change.is_of_linears:
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


def _persistent_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor | None]]:
    own = module.kept_parameters() if isinstance(module, AcceleratedModule) else module._parameters
    yield from own.items()
    for name, buffer in module._buffers.items():
        if name not in module._non_persistent_buffers_set:
            yield name, buffer


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
