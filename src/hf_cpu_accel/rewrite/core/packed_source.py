"""Read packed weights from a file, for a model that was packed and saved before.

The stages and rules are the same as without a file and create the same layers, but take packed weights instead of packing. The
parameters in the file have no values. `placeholders` gives them random ones, so that rules that identify a structure by its output
still work; nothing is compared with them afterward.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from hf_cpu_accel.packing.saved_weight import SavedWeight
from hf_cpu_accel.runtime.context import within

_SCALE = 0.02  # of weights in transformers
_PERIOD = 1_000_003  # numbers, after which they are repeated: a prime, so that rows differ
_APART = 64  # numbers between two placeholders, and two experts
_MOST_NUMBERS, _STRIDES = 1 << 25, (1, 2, 3, 5, 7)


class NotPacked(Exception):
    """The rule did not pack this weight when the model was saved, so it does not pack it now. The message is the reason for the
    plan."""


class PackedSource:
    """The packed weights of a file, for one model.

    Args:
        model: a model with all parameters, those of the file as placeholders.
        weights: the weights of the file whose parameters the model has.
    """

    def __init__(self, model: nn.Module, weights: Sequence[SavedWeight]) -> None:
        self.rule = ""  # the current one
        self.computed: Tensor | None = None  # a weight that is computed from parameters that are not packed
        self._of: dict[int, list[SavedWeight]] = defaultdict(list)
        self._parameters: dict[int, tuple[int, ...]] = {}
        self._left = {id(weight): weight for weight in weights}
        for weight in weights:
            parameters = [model.get_parameter(path) for path in weight.parameters]
            self._parameters[id(weight)] = tuple(map(Tensor.data_ptr, parameters))
            for parameter in parameters:
                self._of[parameter.data_ptr()].append(weight)

    def has(self, parameter: Tensor) -> bool:
        """Return whether `parameter` is part of a packed weight."""
        return parameter.data_ptr() in self._of

    def move(self, address: int, new: int) -> None:
        """Record that the parameter at `address` moves to `new`."""
        for weight in self._of.pop(address, ()):
            self._of[new].append(weight)
            places = self._parameters[id(weight)]
            self._parameters[id(weight)] = tuple(new if place == address else place for place in places)

    def dtype_of(self, parameter: Tensor, rule: str) -> str | None:
        """Return the dtype in which `rule` packed `parameter`, or None if it did not."""
        weights = (weight for weight in self._of.get(parameter.data_ptr(), ()) if weight.rule == rule)
        return next((weight.packed.dtype for weight in weights), None)

    def take(self, parameters: Sequence[Tensor]) -> SavedWeight:
        """Return the packed weight of all `parameters` in their order, by the current rule.

        Raises:
            NotPacked: the file has none.
        """
        wanted = tuple(map(Tensor.data_ptr, parameters))
        for weight in self._of.get(wanted[0], ()):
            if weight.rule == self.rule and self._parameters[id(weight)] == wanted:
                self._left.pop(id(weight), None)
                return weight
        raise NotPacked("the saved file has no packed weight in this form")

    def together(self, parameter: Tensor) -> tuple[int, ...]:
        """Return a key of the parameters that the current rule packed together with `parameter`; empty if it did not pack it."""
        found = [weight for weight in self._of.get(parameter.data_ptr(), ()) if weight.rule == self.rule]
        return self._parameters[id(found[0])] if found else ()

    @property
    def left(self) -> list[SavedWeight]:
        """Return the packed weights that no rule has used."""
        return list(self._left.values())


_current: ContextVar[PackedSource | None] = ContextVar("packed source", default=None)


def use_source(source: PackedSource | None) -> AbstractContextManager[None]:
    """Make rules use packed weights from `source` inside the context, unless it is None."""
    return within(_current, source)


def source() -> PackedSource | None:
    """Return the current source of packed weights, or None if rules pack."""
    return _current.get()


def source_of(parameter: Tensor) -> PackedSource | None:
    """Return the source of the packed weight of `parameter`, or None if it is packed here, as computed weights always are."""
    current = _current.get()
    computed = None if current is None else current.computed
    return None if computed is not None and computed.data_ptr() == parameter.data_ptr() else current


def saved_weight(*parameters: Tensor) -> SavedWeight | None:
    """Return the packed weight of `parameters` from the file, or None without a file.

    Raises:
        NotPacked: there is a file, and it has no such weight.
    """
    current = source_of(parameters[0])
    return None if current is None else current.take(parameters)


def was_packed(parameter: Tensor, rule: str, otherwise: bool) -> bool:
    """Return whether `rule` packed `parameter` when the model was saved; `otherwise` without a file."""
    current = source_of(parameter)
    return otherwise if current is None else current.dtype_of(parameter, rule) is not None


def placeholders(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Return parameters of these shapes and dtypes, each at its own address, that share the memory of the largest.

    Their values look like untrained weights, and no two rows of one are equal. Matrices are contiguous, as grouped products need
    them, except matrices so large (tables and heads) that no stage multiplies by them to identify a structure.
    """
    layouts = [_layout(tuple(parameter.shape)) for parameter in parameters]
    length = max((reach for _, reach in layouts), default=0) + _APART * len(parameters) + 1
    few = torch.randn(min(length, _PERIOD), generator=torch.Generator("cpu").manual_seed(0)).mul_(_SCALE)
    numbers = few.repeat(-(-length // len(few)))
    of_dtype = {dtype: numbers.to(dtype) for dtype in dict.fromkeys(p.dtype for p in parameters)}
    return [
        nn.Parameter(
            of_dtype[parameter.dtype].as_strided(parameter.shape, strides, _APART * number),
            requires_grad=False,
        )
        for number, (parameter, (strides, _)) in enumerate(zip(parameters, layouts, strict=True))
    ]


def mark_placeholder(parameter: nn.Parameter) -> None:
    """Mark `parameter` as one without values of its own; a parameter that is tied to a packed one may have some."""
    parameter._is_placeholder = True  # type: ignore[attr-defined]


def is_placeholder(parameter: Tensor) -> bool:
    return getattr(parameter, "_is_placeholder", False)


def _layout(shape: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """Return strides, and the number of values that they span."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    if len(shape) == 3:  # experts: each begins a little further
        strides[0] = _APART
    elif math.prod(shape) > _MOST_NUMBERS:
        strides = list(_STRIDES[: len(shape)])
    return tuple(strides), sum(step * (size - 1) for step, size in zip(strides, shape, strict=True))
