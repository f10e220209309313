"""One way to declare an op: schema, shape function and plain-torch reference.

The C++ library declares the ops itself. Where it is absent (or older than this file), the references are registered under the same
names, so that callers, `torch.compile` and `torch.export` never see a difference but speed.
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
    """Give the op of `schema` its fake kernel and, if the C++ library is not loaded, its implementation.

    Args:
        schema: the op's schema without namespace, as the C++ library declares it.
        fake: takes the op's arguments, returns empty outputs of the right (symbolic) shape, dtype and strides.
        reference: takes the op's arguments, computes them with plain torch.
    """
    name = schema[: schema.index("(")]
    extension.status()
    if not hasattr(getattr(torch.ops, NAMESPACE), name):
        library.define(schema)
        library.impl(name, reference, "CPU")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    refuse_in_transforms(library, name)


def by_name(schema: str) -> Callable[[Callable[[Any], T]], Callable[..., T]]:
    """For references and fakes of many arguments: the function gets them as attributes of one value, by their names in `schema`,
    and is called as the op is; optional tensors at the end may be left out."""
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
    """The fake kernel of ops whose output has the shape and dtype of their first argument, and is contiguous."""
    return first.new_empty(first.shape)


def positional(op: Any, named: Mapping[str, Any], given: int = 0) -> tuple[Any, ...]:
    """The arguments of a call of `op` by position, in which graphs hold them.

    Args:
        op: an overload of an op.
        named: arguments by their names in its schema. One that is left out has its default, or is None where it is optional.
        given: how many arguments come before these, by position already.

    Returns:
        The arguments after those, up to the last one that is named or has no default.

    Raises:
        TypeError: for a name that the op does not have, and for an argument that it needs.
    """
    declared = op._schema.arguments[given:]
    unknown = named.keys() - {argument.name for argument in declared}
    if unknown:
        raise TypeError(f"{op} has no argument {', '.join(sorted(unknown))} after the first {given}")
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
