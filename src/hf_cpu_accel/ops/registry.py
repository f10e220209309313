"""One way to declare an op: schema, shape function and plain-torch reference.

The C++ library declares the ops itself. Where it is absent (or older than this file), the references are registered under the same
names, so that callers, `torch.compile` and `torch.export` never see a difference but speed.
"""

from __future__ import annotations

from collections.abc import Callable
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
