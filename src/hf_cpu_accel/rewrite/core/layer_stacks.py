"""Find lists of modules: lists of layers, the modules that call them, and plain lists that hold modules."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def stack_of(path: str, root: nn.Module) -> str:
    """Return the path of the module that calls the list of layers with `path` in it, or "" for the root. Work that is done once per
    call of many layers is done there."""
    parts = path.split(".")
    for length in range(1, len(parts)):
        if isinstance(root.get_submodule(".".join(parts[:length])), nn.ModuleList):
            return ".".join(parts[: length - 1])
    return ""


def layers_of(root: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules of lists whose members are alike and have children. Modules above them do not read their
    parts."""
    for module in root.children():
        if isinstance(module, nn.ModuleList) and _is_of_layers(module):
            yield from module
        else:
            yield from layers_of(module)


def in_plain_lists(root: nn.Module) -> set[int]:
    """Return the ids of modules in lists and tuples that are plain attributes of modules."""
    held = (
        value
        for module in root.modules()
        for value in vars(module).values()
        if isinstance(value, list | tuple)
    )
    return {id(item) for values in held for item in values if isinstance(item, nn.Module)}


def _is_of_layers(modules: nn.ModuleList) -> bool:
    is_of_one_class = len({type(module) for module in modules}) == 1
    return is_of_one_class and all(any(True for _ in module.children()) for module in modules)
