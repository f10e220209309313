"""Find the parameters of a model that share memory."""

from __future__ import annotations

from collections import defaultdict

from torch import Tensor, nn

from hf_cpu_accel.checkpoints.stored_weight import plain_tensors


def weight_owners(root: nn.Module) -> dict[int, list[str]]:
    """Return {address: paths of the parameters at it}. A module that is used twice counts once."""
    owners: dict[int, list[str]] = defaultdict(list)
    for path, module in root.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                owners[address_of(parameter)].append(f"{path}.{name}" if path else name)
    return owners


def address_of(parameter: Tensor) -> int:
    """Return a key that is equal for two parameters in the same memory."""
    first = next(plain_tensors(parameter))
    return first.data_ptr() if first.numel() else id(parameter)
