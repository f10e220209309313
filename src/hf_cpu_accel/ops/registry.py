"""One way to declare an op: schema, shape function and plain-torch reference.

The C++ library declares the ops itself. Where it is absent (or older than this file), the references are registered under the same
names, so that callers, `torch.compile` and `torch.export` never see a difference but speed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from hf_cpu_accel import extension

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
            raise TypeError(f"{op} needs {argument.name}")
        length = len(values)
    return tuple(values[:length])
