"""A compiled form bound to one block: its weights, and the checks that the block is unchanged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.compiler import torch_private
from hf_cpu_accel.compiler.background.compiled import LIBRARY, Compiled, follow, size_name
from hf_cpu_accel.compiler.background.expressions import Expression
from hf_cpu_accel.compiler.background.reads import digest, is_settings
from hf_cpu_accel.compiler.bind import Bound
from hf_cpu_accel.patching.hooks import forward_hooks, has_foreign_hook, is_collecting_inside

_REMEMBERED = 512  # shapes


class Library:
    """A loaded artifact, shared by the blocks that it fits.

    Raises:
        ValueError: its sizes or guards are not arithmetic on the sizes of a call.
    """

    def __init__(self, compiled: Compiled, folder: Path) -> None:
        self.compiled, self.folder = compiled, folder
        self._formulas, self._guards = _expressions(compiled)
        self.nest = torch_private.nested(compiled.spec)
        self.run = torch_private.load_library(str(folder / LIBRARY))
        self._known: dict[tuple[Any, ...], bool] = {}

    def fits(self, block: nn.Module) -> bool:
        """Return whether the attributes of `block` have the values that are compiled into the library."""
        return self.misfit(block) is None

    def misfit(self, block: nn.Module) -> str | None:
        """Return the path of an attribute with another value, or None."""
        modules = dict(block.named_modules())
        for read in self.compiled.reads:
            attributes = vars(modules[read.path]) if read.path in modules else {}
            if read.name not in attributes or digest(attributes[read.name]) != read.digest:
                return f"{read.path}.{read.name}"
        return None

    def takes(self, tensors: list[Tensor]) -> bool:
        """Return whether the library supports the sizes of these tensors."""
        shapes = tuple([tensor.shape for tensor in tensors])
        known = self._known.get(shapes)
        if known is None:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            known = self._known[shapes] = self._fit(shapes)
        return known

    def _fit(self, shapes: tuple[torch.Size, ...]) -> bool:
        symbols: dict[str, int] = {}
        formulas: list[tuple[int, Expression]] = []
        for shape, expected in zip(shapes, self.compiled.sizes, strict=True):
            for size, wanted in zip(shape, expected, strict=True):
                if wanted in self._formulas:
                    formulas.append((size, self._formulas[wanted]))
                elif size != (wanted if isinstance(wanted, int) else symbols.setdefault(wanted, size)):
                    return False
        for symbol, size in symbols.items():
            least, greatest = self.compiled.ranges[symbol]
            if size < least or (greatest is not None and size > greatest):
                return False
        if any(size != formula(symbols) for size, formula in formulas):
            return False
        named = {size_name(n, dim): size for n, shape in enumerate(shapes) for dim, size in enumerate(shape)}
        return all(guard(named) for guard in self._guards)


def _expressions(compiled: Compiled) -> tuple[dict[int | str, Expression], list[Expression]]:
    """Return the sizes that are formulas, by their text, and the guards."""
    sizes = [size for shape in compiled.sizes for size in shape if isinstance(size, str)]
    symbols = compiled.ranges.keys() & set(sizes)
    named = {size_name(n, dim) for n, shape in enumerate(compiled.sizes) for dim in range(len(shape))}
    formulas: dict[int | str, Expression] = {size: Expression(size) for size in sizes if size not in symbols}
    guards = [Expression(guard) for guard in compiled.guards]
    for known, expressions in ((symbols, formulas.values()), (named, guards)):
        for expression in expressions:
            if not expression.names <= known:
                raise ValueError(f"unknown sizes: {sorted(expression.names - known)}")
    return formulas, guards


class BoundBlock:
    """Runs `library` with the weights of `block`.

    Raises:
        LookupError, TypeError: the block lacks a tensor that the library needs.
    """

    def __init__(self, library: Library, block: nn.Module) -> None:
        self.library = library
        compiled = library.compiled
        self._sources = [None if p.kind == "input" else _source(block, p) for p in compiled.places]
        self._inputs = [index for index, place in enumerate(compiled.places) if place.kind == "input"]
        state = [follow(block, place.path) for place in compiled.places if place.kind == "state"]
        if not all(isinstance(tensor, Tensor) for tensor in state):
            raise TypeError("a weight is not a tensor")
        self._state: list[Tensor] = state
        self._dtypes = [tensor.dtype for tensor in state]
        self._bound = Bound(library.run, compiled.kept, compiled.requests)
        self._watch = _watch(block, compiled)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        """Return the block's output, or NotImplemented if the library does not support this call."""
        if not (self._watch() and self.library.takes(tensors)):
            return NotImplemented
        if [tensor.dtype for tensor in self._state] != self._dtypes:
            return NotImplemented
        inputs = self._sources.copy()
        for index, tensor in zip(self._inputs, tensors, strict=True):
            inputs[index] = tensor.contiguous()
        row = self._bound(*inputs)
        outputs = [
            row[output] if type(output) is int else output[1] for output in self.library.compiled.outputs
        ]
        return self.library.nest(outputs)


def _source(block: nn.Module, place: Any) -> Any:
    return follow(block, place.path) if place.kind == "state" else place.path


def _watch(block: nn.Module, compiled: Compiled) -> Callable[[], bool]:
    """Return a function that checks, in a few microseconds, whether the block is unchanged since now."""
    modules = dict(block.named_modules())
    children = [module for module in modules.values() if module is not block]
    read = [(vars(modules[r.path]), r.name, vars(modules[r.path])[r.name]) for r in compiled.reads]
    # Other objects are replaced, which the check of identity finds; configurations are also written to.
    settings = {id(value): (vars(value), dict(vars(value))) for _, _, value in read if is_settings(value)}
    written = list(settings.values())
    holders = [part for m in modules.values() for part in (m._parameters, m._buffers, m._modules) if part]
    parts = [(holder, list(holder.values())) for holder in holders]  # references, so that no id is reused
    ids = [list(map(id, values)) for _, values in parts]
    forwards = [(vars(child), vars(child).get("forward")) for child in children]
    hooks = [hook for child in children for hook in forward_hooks(child)]

    def unchanged() -> bool:
        for attributes, name, value in read:
            now = attributes.get(name)
            if now is not value and (type(now) not in (bool, int, float, str) or now != value):
                return False
        for now, before in written:
            if now != before:
                return False
        for (holder, _), before_ids in zip(parts, ids, strict=True):
            if list(map(id, holder.values())) != before_ids:
                return False
        for attributes, forward in forwards:
            if attributes.get("forward") is not forward:
                return False
        if any(hooks):
            return not any(map(has_foreign_hook, hooks)) and not is_collecting_inside()
        return True

    return unchanged
