"""Models with float16 weights compute in float32 while they are accelerated, and stay float16 for their callers.

float32 holds every value of float16, and eager float16 is slow on CPUs. Calls from outside are converted on their way in and
out. Calls between the parts of the model are not.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_cpu_accel.patching.float16_values import to_float16, to_float32
from hf_cpu_accel.patching.inner_forward import InnerForward
from hf_cpu_accel.patching.override import Override

# Values that generation and losses compute in float32 for models of any dtype.
_FLOAT32_OUTPUTS = ("loss", "scores", "logits", "sequences_scores")


class Float16Model:
    """The state of a model with float16 weights.

    Attributes:
        dtype: dtype of these weights for callers: float16, or the dtype of a later `model.to(dtype)`.
        names: their names in the model's state dict, and those of its float16 buffers.
        is_all: whether they are all parameters with floating point.
    """

    def __init__(self, names: frozenset[str], *, is_all: bool) -> None:
        self.dtype = torch.float16
        self.names = names
        self.is_all = is_all

    @property
    def is_called(self) -> bool:
        """Return whether a method of the model is running here, or may be: sessions of continuous batching run in their own
        threads."""
        if torch.compiler.is_compiling():
            return True
        return any(model is self for model in (*_calling.get(), *_sessions.values()))

    def call(
        self, method: Callable[..., Any], args: Any, kwargs: Any, *, whole: bool, generates: bool
    ) -> Any:
        """Return `method(*args, **kwargs)`, with tensors converted unless a method of the same model calls.

        Args:
            whole: whether the method belongs to the model itself, and not to a part of it.
            generates: whether it is `generate`, whose scores are float32.
        """
        compiles = torch.compiler.is_compiling()
        # Dynamo does not track callers: compiled code counts as a call of the model itself.
        inside = not whole if compiles else any(model is self for model in _calling.get())
        if inside or self.dtype is not torch.float16:
            return method(*args, **kwargs)
        args, kwargs = to_float32(args), to_float32(kwargs)
        if compiles:
            return to_float16(method(*args, **kwargs))
        before = _calling.set((*_calling.get(), self))
        try:
            output = method(*args, **kwargs)
        finally:
            _calling.reset(before)
        return to_float16(output, _FLOAT32_OUTPUTS if generates else _FLOAT32_OUTPUTS[:1])


# The models with running methods in this context.
_calling: ContextVar[tuple[Float16Model, ...]] = ContextVar("calling", default=())
# The models that managers of continuous batching serve; they create their caches by `model.dtype`.
_sessions: weakref.WeakKeyDictionary[Any, Float16Model] = weakref.WeakKeyDictionary()


class Float16Dtype(nn.Module):
    """`model.dtype`: pipelines cast their inputs to it, and code inside of the model its new tensors.

    A mixin for model classes; copies and pickles name the class of the model instead of the mixed class.
    """

    _float16: Float16Model
    _original_class: type[nn.Module]

    @property
    def dtype(self) -> torch.dtype:
        """Return float16 to callers, and the compute dtype to the model itself."""
        known = self._float16
        if not known.is_called and known.dtype is torch.float16:
            return torch.float16
        inner: torch.dtype = super().dtype  # type: ignore[misc]
        return inner

    def __reduce__(self) -> tuple[Any, ...]:
        return _empty, (self._original_class,), self.__getstate__()


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def float16_class(original: type[nn.Module]) -> type[nn.Module]:
    """Return `original`, under its own name, with the `dtype` above; always the same class for one original."""
    if original not in _classes:
        names = ("__module__", "__qualname__", "__doc__")
        members: dict[str, Any] = {name: getattr(original, name) for name in names}
        members["_original_class"] = original
        _classes[original] = type(original.__name__, (Float16Dtype, original), members)
    return _classes[original]


def _empty(original: type[nn.Module]) -> nn.Module:
    cls = float16_class(original)
    return cls.__new__(cls)


@dataclass(frozen=True)
class SwappedClass:
    """A change in the journal: `module` was an instance of `original` itself."""

    module: nn.Module
    original: type[nn.Module]

    def undo(self) -> None:
        self.module.__class__ = self.original


class Float16Forward(InnerForward):
    """`forward` of a model, or of a model inside of one, that computes in float32 with float16 weights."""

    def __init__(self, module: nn.Module, model: Float16Model, *, whole: bool) -> None:
        super().__init__(module)
        self.float16 = model
        self.whole = whole

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """Return the forward of the class as a function: Dynamo would look up a method by name and find this object."""
        return functools.partial(type(self.model).forward, self.model)

    @property
    def __code__(self) -> Any:
        """Return the code of the class's forward, by which torch.export names the source of a model."""
        return type(self.model).forward.__code__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.is_on:
            return self.__wrapped__(*args, **kwargs)
        return self.float16.call(self.__wrapped__, args, kwargs, whole=self.whole, generates=False)


class Float16Method(Override):
    """Another method of the model that takes or returns tensors.

    Attributes:
        inner: the attribute that it replaced, an override of this package or other code; None for the method of the class.
    """

    def __init__(self, module: nn.Module, name: str, model: Float16Model, *, whole: bool) -> None:
        self.name = name
        super().__init__(module)
        self.float16 = model
        self.whole = whole
        self.inner: Callable[..., Any] | None = vars(module).get(name)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        if self.inner is None:
            return super().__wrapped__
        if not isinstance(self.inner, Override):
            return self.inner
        bound: Any = copy.copy(self.inner)
        bound.model = self.model  # a shadow binds overrides to itself
        return bound

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        generates = self.name == "generate"
        return self.float16.call(self.__wrapped__, args, kwargs, whole=self.whole, generates=generates)


class Float16Session(Float16Method):
    """`init_continuous_batching` of the model."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        manager = self.__wrapped__(*args, **kwargs)
        _sessions[manager] = self.float16
        return manager
