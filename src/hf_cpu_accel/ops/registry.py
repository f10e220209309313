"""Declaration of ops: schema, fake kernel and a reference in PyTorch.

The C++ library declares its ops itself. Without it, or with an older one, the references are registered under the same names, so
that callers, `torch.compile` and `torch.export` work the same, only slower.
"""

from __future__ import annotations

import itertools
from collections import namedtuple
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from hf_cpu_accel import extension
from hf_cpu_accel.ops.derivatives import refuse_in_transforms

T = TypeVar("T")

NAMESPACE = "hf_cpu_accel"
library = torch.library.Library(NAMESPACE, "FRAGMENT")


def declare(schema: str, *, fake: Callable[..., Any], reference: Callable[..., Any]) -> None:
    """Register the fake kernel of an op and, if the C++ library does not define the op, its reference.

    Args:
        schema: the op's schema without namespace, as in the C++ library.
        fake: maps the op's arguments to empty outputs of the right (symbolic) shape, dtype and strides.
        reference: maps the op's arguments to its outputs, computed in PyTorch.
    """
    name = schema[: schema.index("(")]
    extension.status()
    if not hasattr(getattr(torch.ops, NAMESPACE), name):
        library.define(schema)
        library.impl(name, reference, "CPU")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    refuse_in_transforms(library, name)


def by_name(schema: str) -> Callable[[Callable[[Any], T]], Callable[..., T]]:
    """Decorate a reference or fake kernel of many arguments to receive them as attributes of one value, named as in `schema`.

    The decorated function is called like the op; optional tensors at the end may be omitted.
    """
    declared = torch._C.parse_schema(schema).arguments
    last = itertools.takewhile(_may_be_left_out, reversed(declared))
    defaults = [argument.default_value for argument in last][::-1]
    arguments = namedtuple("arguments", [argument.name for argument in declared], defaults=defaults)  # type: ignore[misc]

    def decorate(function: Callable[[Any], T]) -> Callable[..., T]:
        @wraps(function)
        def called(*args: Any, **kwargs: Any) -> T:
            return function(arguments(*args, **kwargs))

        return called

    return decorate


def _may_be_left_out(argument: Any) -> bool:
    return argument.has_default_value() or isinstance(argument.type, torch.OptionalType)


def like_first(first: Tensor, *_: object) -> Tensor:
    """Return an empty tensor: the fake kernel of ops with a contiguous output in the shape and dtype of the first argument."""
    return first.new_empty(first.shape)


def positional(op: Any, named: Mapping[str, Any], first: int = 0) -> tuple[Any, ...]:
    """Convert arguments by name to arguments by position, which graphs use.

    Args:
        op: an overload of an op.
        named: arguments by their names in its schema. A missing one has its default, or is None if it is optional.
        first: the number of arguments before these that are passed by position.

    Returns:
        The arguments from `first` on, up to the last one that is named or has no default.

    Raises:
        TypeError: an unknown name, or a missing argument without a default.
    """
    declared = op._schema.arguments[first:]
    unknown = named.keys() - {argument.name for argument in declared}
    if unknown:
        raise TypeError(f"{op} has no argument {', '.join(sorted(unknown))} after the first {first}")
    values: list[Any] = []
    length = 0
    for argument in declared:
        if argument.name in named:
            values.append(named[argument.name])
        elif argument.has_default_value():
            values.append(argument.default_value)
            continue
        elif isinstance(argument.type, torch.OptionalType):
            values.append(None)
        else:
            raise TypeError(f"{op}: the required argument {argument.name} is missing")
        length = len(values)
    return tuple(values[:length])
