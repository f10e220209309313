"""What an instance does with a request: one call of the model, or a batch whose items get a result or an exception each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.hosts.loaded import loaded
from hf_cpu_accel.hosts.transformers import is_pipeline

# Method by which encoders of sentence-transformers take texts.
_LIBRARY = "sentence_transformers"
_ENCODERS = {"SentenceTransformer": "encode", "SparseEncoder": "encode", "CrossEncoder": "predict"}


@dataclass(frozen=True)
class Failed:
    """In the place of an item's result: what it failed with."""

    error: Exception


@dataclass(frozen=True)
class One:
    """A call of the model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Many:
    """A batch."""

    items: list[Any]


Request = One | Many


@dataclass(frozen=True)
class Work:
    """A model, and how it is called.

    Attributes:
        call: `call(model, ...)` instead of what is usual for the model: with what `submit` was given, with an item of `map`, or, if
            `map` was given a batch_size, with a list of items, for which it returns a sequence with a result for each.
    """

    model: Any
    call: Callable[..., Any] | None = None

    def do(self, request: Request) -> Any:
        """The result of `One`; of `Many` a list with a result or `Failed` for each item."""
        if isinstance(request, One):
            return self._one(request)
        return self._many(request.items)

    def one(self, item: Any) -> One:
        """The call for a single item: a module takes the fields of a mapping by their names."""
        if self.call is None and isinstance(self.model, nn.Module) and not _encode(self.model):
            if isinstance(item, Mapping):
                return One((), dict(item))
            if isinstance(item, tuple):
                return One(item, {})
        return One((item,), {})

    def _one(self, request: One) -> Any:
        if self.call is not None:
            return self.call(self.model, *request.args, **request.kwargs)
        encode = _encode(self.model)
        if encode is not None:
            return encode(*request.args, **{"show_progress_bar": False, **request.kwargs})
        with torch.inference_mode():
            return self.model(*request.args, **request.kwargs)

    def _many(self, items: list[Any]) -> list[Any]:
        """Where the batch fails, each item is tried alone, so that the others have their results."""
        try:
            return self._together(items)
        except Exception as error:
            if len(items) == 1:
                return [Failed(error)]
        return [result for item in items for result in self._many([item])]

    def _together(self, items: list[Any]) -> list[Any]:
        results = self._batch(items)
        if not hasattr(results, "__len__") or len(results) != len(items):
            count = len(results) if hasattr(results, "__len__") else f"one {type(results).__name__}"
            raise ValueError(f"{len(items)} items gave {count}: call has to return one result for each item")
        return list(results)

    def _batch(self, items: list[Any]) -> Sequence[Any]:
        if self.call is not None:
            return self.call(self.model, items)
        encode = _encode(self.model)
        if encode is not None:
            return encode(items, batch_size=len(items), show_progress_bar=False)
        if isinstance(self.model, nn.Module):
            with torch.inference_mode():
                stacked = torch.utils.data.default_collate(items)
                inputs = self.one(tuple(stacked) if isinstance(items[0], tuple) else stacked)
                return split(self.model(*inputs.args, **inputs.kwargs), len(items))
        if is_pipeline(self.model):
            return self.model(items, batch_size=len(items))
        return self.model(items)


def split(output: Any, count: int) -> list[Any]:
    """The output of a batch as one output for each of its rows: tensors along their first dimension, others as they are.

    Raises:
        ValueError: a tensor has another number of rows.
    """
    if isinstance(output, Tensor):
        if output.dim() == 0 or len(output) != count:
            raise ValueError(
                f"an output of shape {list(output.shape)} has no row for each of {count} items: pass call="
            )
        return list(output.unbind())
    if isinstance(output, Mapping):
        columns = {name: split(value, count) for name, value in output.items()}
        return [
            _like(output, {name: column[row] for name, column in columns.items()}) for row in range(count)
        ]
    if isinstance(output, (tuple, list)):
        parts = [split(value, count) for value in output]
        return [tuple(part[row] for part in parts) for row in range(count)]
    return [output] * count


def _like(output: Mapping[str, Any], fields: dict[str, Any]) -> Any:
    """The model outputs of transformers and diffusers are mappings that take their fields by name."""
    return fields if type(output) is dict else type(output)(**fields)


def _encode(model: Any) -> Callable[..., Any] | None:
    methods = (method for name, method in _ENCODERS.items() if isinstance(model, loaded(_LIBRARY, name)))
    method = next(methods, None)
    return None if method is None else getattr(model, method)
