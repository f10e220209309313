"""The original layer for `torch.jit.script`, because TorchScript cannot compile the replaced forward and propagate."""

from __future__ import annotations

import copy

from torch_geometric.nn.conv import MessagePassing


class StockForScript:
    """Called by `torch.jit.script` as `conv.__prepare_scriptable__()`."""

    name = "__prepare_scriptable__"

    def __init__(self, conv: MessagePassing) -> None:
        self.conv = conv

    def __call__(self) -> MessagePassing:
        """Return a copy of the layer with its own forward and propagate, on the same parameters."""
        stock = copy.copy(self.conv)
        for attribute in ("forward", "propagate", self.name):
            vars(stock).pop(attribute, None)
        return stock
