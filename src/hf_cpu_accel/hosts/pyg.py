"""Modules with layers of PyTorch Geometric."""

from __future__ import annotations

from torch import nn

from hf_cpu_accel.hosts.loaded import loaded
from hf_cpu_accel.hosts.root import Root


def roots(target: object) -> tuple[Root, ...] | None:
    """Return the module; None if it has no message passing layer.

    It has no deciding modules, because message passing is accelerated for training too.
    """
    layers = message_passing()
    if (
        not layers
        or not isinstance(target, nn.Module)
        or not any(isinstance(m, layers) for m in target.modules())
    ):
        return None
    return (Root(target, "pyg", ()),)


def message_passing() -> tuple[type[nn.Module], ...]:
    """Return `MessagePassing`, for `isinstance`; nothing where no layer of it can exist."""
    return loaded("torch_geometric.nn.conv.message_passing", "MessagePassing")
