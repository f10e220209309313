"""Where a layer is called from: what is done once per call of many layers is done there."""

from __future__ import annotations

from torch import nn


def stack_of(path: str, root: nn.Module) -> str:
    """The path of the module that calls the list of layers which `path` is in; of the root, "", if it is in none."""
    parts = path.split(".")
    for length in range(1, len(parts)):
        if isinstance(root.get_submodule(".".join(parts[:length])), nn.ModuleList):
            return ".".join(parts[: length - 1])
    return ""
