"""Run the requests of an instance: one call of the model, or a batch with a result or an exception per item."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.hosts.loaded import loaded
from hf_cpu_accel.hosts.transformers import is_pipeline

# Methods of sentence-transformers encoders for texts.
_LIBRARY = "sentence_transformers"
_ENCODERS = {"SentenceTransformer": "encode", "SparseEncoder": "encode", "CrossEncoder": "predict"}


@dataclass(frozen=True)
class Failed:
    """The exception of an item, in the place of its result."""

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
    """A model and its call.

    Attributes:
        model: the model.
        call: `call(model, ...)` replaces the default call. It gets the arguments of `submit`, an item of `map`, or with a
            batch_size a list of items, for which it returns a sequence with one result per item.
    """

    model: Any
    call: Callable[..., Any] | None = None

    def run(self, request: Request) -> Any:
        """Return the result of `One`, or for `Many` a list with a result or `Failed` per item."""
        if isinstance(request, One):
            return self._one(request)
        return self._many(request.items)

    def one(self, item: Any) -> One:
        """Return the call for a single item: a module gets the fields of a mapping as keyword arguments."""
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
        """Run a batch; if it fails, run each item alone, so that only the failing items get an exception."""
        try:
            return self._checked_batch(items)
        except Exception as error:
            if len(items) == 1:
                return [Failed(error)]
        return [result for item in items for result in self._many([item])]

    def _checked_batch(self, items: list[Any]) -> list[Any]:
        """Run a batch in one call.

        Raises:
            ValueError: the number of results differs from the number of items.
        """
        results = self._batch(items)
        if not hasattr(results, "__len__") or len(results) != len(items):
            count = len(results) if hasattr(results, "__len__") else f"one {type(results).__name__}"
            raise ValueError(f"{len(items)} items returned {count}: call must return one result per item")
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
    """Split the output of a batch into one output per row: tensors along their first dimension; other values are repeated.

    Args:
        output: output of the model.
        count: number of rows.

    Raises:
        ValueError: a tensor has another number of rows.
    """
    if isinstance(output, Tensor):
        if output.dim() == 0 or len(output) != count:
            raise ValueError(
                f"an output of shape {list(output.shape)} cannot be split into {count} rows: pass call=, which returns one "
                "result per item"
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
    """Return a mapping of the same type; model outputs of transformers and diffusers get their fields as keyword arguments."""
    return fields if type(output) is dict else type(output)(**fields)


def _encode(model: Any) -> Callable[..., Any] | None:
    methods = (method for name, method in _ENCODERS.items() if isinstance(model, loaded(_LIBRARY, name)))
    method = next(methods, None)
    return None if method is None else getattr(model, method)
