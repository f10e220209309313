"""The call of a layer: the form of its arguments, and the tensors and ints in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.lazy.lazy_tensor import LazyTensor
from hf_cpu_accel.rewrite.capture.caches import cache_contents, copy_cache, form_of, is_cache
from hf_cpu_accel.rewrite.capture.program import Ref, replace_refs
from hf_cpu_accel.rewrite.core.cache_state import Snapshot, snapshot
from hf_cpu_accel.rewrite.core.refusal import Refusal

_CONSTANTS = (type(None), bool, float, str)


@dataclass(frozen=True)
class Call:
    """One call.

    Attributes:
        form: the key of a program: the structure of the arguments, the dtypes and dimensions of tensors, and which of them
            are equal.
        inputs: the tensors, ints and caches, each once.
        sizes: all their sizes, and the numbers of tokens in caches.
        index: of the layer's part of a cache, or None.
        given: the arguments, with refs in place of the inputs.
    """

    form: tuple[Any, ...]
    inputs: list[Any]
    sizes: tuple[int, ...]
    index: int | None
    given: tuple[tuple[Any, ...], dict[str, Any]]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any], index: int | None = None) -> Call | Refusal:
        """Return the call, or a refusal if it has other arguments, or no tensor."""
        reading = _Reading(index)
        try:
            given = reading.read(args), {name: reading.read(value) for name, value in kwargs.items()}
        except TypeError as error:
            return Refusal(str(error))
        if not any(isinstance(value, Tensor) for value in reading.inputs):
            return Refusal("calls without tensor arguments are not recorded")
        form = (torch.get_default_dtype(), *reading.form, *kwargs)
        return cls(form, reading.inputs, tuple(reading.sizes), index, given)

    @property
    def tensors(self) -> Iterator[Tensor]:
        return (value for value in self.inputs if isinstance(value, Tensor))

    @property
    def snapshots(self) -> list[Snapshot]:
        """Return the layer's part of each cache before the call."""
        return [snapshot(value, self.index) for value in self.inputs if is_cache(value)]

    @property
    def caches(self) -> tuple[tuple[Any, int | None], ...]:
        """Return the caches that the call may write to, with the index of the layer's part."""
        return tuple((value, self.index) for value in self.inputs if is_cache(value))

    def inputs_beside(self, *, tensors: bool = False) -> list[Any]:
        """Return the inputs, with copies of caches, for a call that leaves the caches unchanged.

        Args:
            tensors: whether to copy tensors, too, and shared ones.
        """

        def beside(value: Any) -> Any:
            if is_cache(value):
                return copy_cache(value, self.index, tensors=tensors)
            return value.clone() if tensors and isinstance(value, Tensor) else value

        return [beside(value) for value in self.inputs]

    def snapshot_outputs(self, output: Any, inputs: list[Any]) -> tuple[Any, list[Any]]:
        """Return the results of a call with `inputs` for a comparison: the output, with numbers in place of caches, and copies
        of the layer's part of each cache."""
        caches = {id(value): Ref(number) for number, value in enumerate(inputs) if is_cache(value)}
        return _with_numbers(output, caches), [
            cache_contents(inputs[ref.number], self.index) for ref in caches.values()
        ]

    def arguments(self, inputs: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with other inputs."""
        args, kwargs = (replace_refs(part, lambda ref: inputs[ref.number]) for part in self.given)
        return args, kwargs


def _with_numbers(value: Any, caches: dict[int, Ref]) -> Any:
    if type(value) in (tuple, list):
        return type(value)([_with_numbers(part, caches) for part in value])
    if type(value) is dict:
        return {key: _with_numbers(part, caches) for key, part in value.items()}
    return caches.get(id(value), value)


class _Reading:
    def __init__(self, index: int | None) -> None:
        self._index = index
        self.form: list[Any] = []
        self.inputs: list[Any] = []
        self.sizes: list[int] = []
        self._seen: dict[int, Ref] = {}

    def read(self, value: Any) -> Any:
        """Return the value with refs in place of inputs.

        Raises:
            TypeError: a program cannot have such an argument.
        """
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, _CONSTANTS):
            self.form.append(
                (type(value), value) if value == 1 or value == 0 else value
            )  # True is 1.0, but no float
            return value
        if type(value) is int:
            self.form.append(int)
            self.sizes.append(value)
            return self._input(value)
        if type(value) in (tuple, list, torch.Size):
            self.form.append((type(value), len(value)))
            return (list if type(value) is list else tuple)([self.read(part) for part in value])
        if type(value) is dict and all(type(key) is str for key in value):
            self.form.append((dict, *value))
            return {key: self.read(part) for key, part in value.items()}
        if is_cache(value):
            form, lengths = form_of(value, self._index)
            self.form.append(form)
            self.sizes.extend(lengths)
            return self._input(value)
        raise TypeError(f"calls with {type(value).__name__} arguments are not recorded")

    def _tensor(self, tensor: Tensor) -> Ref:
        known = self._seen.get(id(tensor))
        if known is None:
            if type(tensor) not in (Tensor, nn.Parameter) and not isinstance(tensor, LazyTensor):
                raise TypeError(f"calls with {type(tensor).__name__} arguments are not recorded")
            if not tensor.is_cpu:
                raise TypeError(f"calls with tensors on {tensor.device} are not recorded")
            self.form.append((type(tensor), tensor.dtype, tensor.dim()))
            self.sizes.extend(tensor.shape)
            known = self._seen[id(tensor)] = self._input(tensor)
        else:
            self.form.append(known)
        return known

    def _input(self, value: Any) -> Ref:
        self.inputs.append(value)
        return Ref(len(self.inputs) - 1)
