"""Errors for derivatives that ops do not have, instead of gradients that are None and tangents that are zero.

There are three ways to compute a derivative:

- reverse mode: an input requires a gradient while gradients are recorded;
- forward mode (`torch.autograd.forward_ad`): an input has a tangent;
- transforms of `torch.func`, which do the two on tensors of their own.

`declare` gives every op the kernel of `refuse_in_transforms`, which runs only under a transform. Outside of transforms no dispatch
key marks a tensor with a tangent, and a Python kernel would add 2 us to every call. There modules and functions call
`refuse_derivatives` with their inputs. Ops on graphs, which have derivatives in reverse mode, call `refuse_tangents`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, func
from torch.autograd import forward_ad

_TRANSFORMS = "FuncTorchDynamicLayerFrontMode"  # the dispatch key that calls have under a transform only


def in_forward_mode() -> bool:
    """Return whether a level of forward mode is active. Only then tensors have tangents; to check one takes ten times as long."""
    return forward_ad._current_level >= 0


def has_tangent(*inputs: Tensor | None) -> bool:
    """Return whether one of `inputs` has a tangent: its derivative is computed in forward mode."""
    return in_forward_mode() and any(x is not None and _has_tangent(x) for x in inputs)


def needs_gradient(*inputs: Tensor | None) -> bool:
    """Return whether autograd records what is computed from one of `inputs`."""
    if torch.is_grad_enabled():
        for x in inputs:  # no generator, which is slower than the check
            if x is not None and x.requires_grad:
                return True
    return False


def wants_derivative(*inputs: Tensor | None) -> bool:
    """Return whether the derivative with respect to one of `inputs` is computed, in reverse mode or in forward mode."""
    return needs_gradient(*inputs) or has_tangent(*inputs)


def refuse_derivatives(name: str, *inputs: Tensor | None) -> None:
    """Raise where the derivative of `name` with respect to one of `inputs` is computed.

    Raises:
        RuntimeError: with the remedies.
    """
    if (torch.is_grad_enabled() or in_forward_mode()) and wants_derivative(*inputs):
        raise RuntimeError(
            f"{name} has no derivative, and an input requires a gradient or has a tangent (torch.autograd.forward_ad, "
            "torch.func): run under torch.no_grad() with plain tensors, or call hf_cpu_accel.restore(model) first"
        )


def refuse_tangents(name: str, *inputs: Tensor | None) -> None:
    """Raise where the derivative of `name`, which has one in reverse mode only, is computed in forward mode.

    Raises:
        RuntimeError: with the remedies.
    """
    if has_tangent(*inputs):
        raise RuntimeError(
            f"{name} has no forward-mode derivative, and an input has a tangent (torch.autograd.forward_ad): compute the "
            "derivative in reverse mode, or call hf_cpu_accel.restore(model) first"
        )


class TransformError(RuntimeError):
    """An op does not support the active transform of `torch.func`. The message names the remedy."""

    def __init__(self, name: str, reason: object) -> None:
        super().__init__(
            f"{name} does not run under this transform of torch.func: {reason}; call hf_cpu_accel.restore(model) first, or call "
            "the model outside of the transform"
        )


def refuse_transforms(name: str, x: Tensor) -> None:
    """Raise where `x` is a tensor of a transform of `torch.func`: a batch of `vmap`, or one that is differentiated.

    It takes 0.3 us, and does not trace. Layers that defer their work call it.

    Raises:
        TransformError: with the remedies.
    """
    if func.debug_unwrap(x, recurse=False) is not x:
        raise TransformError(name, "its input is a tensor of the transform")


def in_transform() -> bool:
    """Return whether a transform of `torch.func` is active: nothing is measured, compared or recorded under one.

    It takes 0.2 us, and does not trace.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None


def refuse_in_transforms(library: torch.library.Library, name: str) -> None:
    """Make the op `name` of `library` raise under transforms of `torch.func` that differentiate it, or that fail.

    Other calls under a transform run as usual: with constants, and slice by slice under `vmap`.
    """
    op = f"{library.ns}::{name}"
    stock = torch.library.get_kernel(op, _TRANSFORMS)

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        refuse_derivatives(f"the op {op} under torch.func", *_tensors((*args, *kwargs.values())))
        try:
            return stock.call_boxed(keys, *args, **kwargs)
        except TransformError:  # of a slice
            raise
        except RuntimeError as error:
            raise TransformError(f"the op {op}", error) from error

    library.impl(name, kernel, _TRANSFORMS, with_keyset=True)


def _has_tangent(x: Tensor) -> bool:
    try:
        return forward_ad.unpack_dual(x).tangent is not None
    except RuntimeError:  # a batch of vmap cannot be asked: assume that it is differentiated
        return True


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
