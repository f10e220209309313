"""The inputs of the linears of a model: passed to a callback, or sampled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

See = Callable[[str, nn.Module, Tensor], None]


def linears_of(root: nn.Module) -> dict[str, nn.Module]:
    """Return {path: module} of the linears: `nn.Linear`, and transformers' Conv1D, whose weight is transposed.

    A module at several paths is returned at the first.
    """
    return {path: module for path, module in root.named_modules() if _is_linear(module)}


@contextmanager
def layer_inputs(layers: Mapping[str, nn.Module], see: See) -> Iterator[None]:
    """Inside, `see(path, layer, rows)` is called before each call of one of `layers`.

    The rows are a view of the input, [n, in_features] in its dtype; copy them to keep them. It uses hooks, so the model must not be
    accelerated.

    Args:
        layers: {path: module}, see `linears_of`.
        see: the callback; its exceptions propagate through the call of the model.
    """
    handles = [
        layer.register_forward_pre_hook(partial(_look, path, see), with_kwargs=True)
        for path, layer in layers.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class RowSample:
    """A deterministic sample of the rows of each layer's input, as the argument `see` of `layer_inputs`.

    Args:
        most: the maximum rows per layer. They take `most / out_features` of the memory of its weight.
        of_call: the maximum rows from one call, evenly spaced.

    Attributes:
        seen: the number of input rows of each layer.
    """

    def __init__(self, most: int = 64, of_call: int = 16) -> None:
        self.most, self.of_call = most, of_call
        self.seen: dict[str, int] = {}
        self._kept: dict[str, list[Tensor]] = {}

    def __call__(self, path: str, layer: nn.Module, rows: Tensor) -> None:
        kept = self._kept.setdefault(path, [])
        self.seen[path] = self.seen.get(path, 0) + len(rows)
        count = min(len(rows), self.of_call, self.most - sum(map(len, kept)))
        if count > 0:
            places = torch.linspace(0, len(rows) - 1, count).long()
            kept.append(rows.detach()[places])

    def rows(self) -> dict[str, Tensor]:
        """Return {path: [at most `most`, in_features]} of the layers that were called."""
        return {path: torch.cat(kept) for path, kept in self._kept.items() if kept}


def _look(path: str, see: See, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    input = args[0] if args else next(iter(kwargs.values()), None)
    if isinstance(input, Tensor) and input.dim() > 0 and input.shape[-1] > 0:
        see(path, layer, input.detach().reshape(-1, input.shape[-1]))


def _is_linear(module: nn.Module) -> bool:
    if isinstance(module, nn.Linear):
        return True
    weight = module._parameters.get("weight")
    return type(module).__name__ == "Conv1D" and weight is not None and weight.dim() == 2
