"""Modules with layers of PyTorch Geometric."""

from __future__ import annotations

from torch import nn
from torch_geometric.nn.conv import MessagePassing

from hf_cpu_accel.hosts.find import Root


def roots(target: object) -> tuple[Root, ...] | None:
    """The module; None if it has no message passing in it.

    No module decides about a mode: message passing is accelerated for training, too.
    """
    if not isinstance(target, nn.Module) or not any(isinstance(m, MessagePassing) for m in target.modules()):
        return None
    return (Root(target, "pyg", ()),)
