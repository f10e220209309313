"""What a model must be like to be accelerated. Everything here is checked before anything is touched."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hf_cpu_accel.frontends.find import Root


def check_model(root: nn.Module, deciding: Iterable[nn.Module]) -> None:
    """Refuse a model that cannot be accelerated.

    Args:
        root: the model.
        deciding: the modules whose `training` flags count, with all below them.

    Raises:
        ValueError: training mode, parameters that are elsewhere than on the CPU, have no values or not finite ones.
    """
    for module in deciding:
        _check_mode(module)
    for name, parameter in root.named_parameters():
        _check_initialised(name, parameter)
        _check_device(name, parameter)
        _check_finite(name, parameter)
    for name, buffer in root.named_buffers():
        _check_initialised(name, buffer)
        _check_device(name, buffer)


def check_patterns(roots: Sequence[Root], patterns: Iterable[str]) -> None:
    """Refuse a `skip_modules` pattern that matches no module of `roots`: it is a slip of the pen.

    Raises:
        ValueError: naming the pattern.
    """
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for root in roots for path in _paths(root)):
            models = " or ".join(type(root.module).__name__ for root in roots)
            raise ValueError(f"skip_modules: {pattern!r} matches no module of {models}")


def _paths(root: Root) -> Iterator[str]:
    for path, _ in root.module.named_modules():
        yield ".".join(filter(None, (root.name, path)))


def _check_mode(module: nn.Module) -> None:
    for name, child in module.named_modules():
        if child.training:
            where = f"its module {name!r}" if name else type(module).__name__
            raise ValueError(
                f"target: {where} is in training mode, and acceleration is for inference: call model.eval() first"
            )


def _check_initialised(name: str, tensor: Tensor) -> None:
    if is_lazy(tensor):
        raise ValueError(f"target: {name} is not initialised yet: run the model once first")


def _check_device(name: str, tensor: Tensor) -> None:
    if tensor.device.type == "meta":
        raise ValueError(
            f"target: {name} is on the meta device and has no values: load the model with real weights first"
        )
    if tensor.device.type != "cpu":
        raise ValueError(
            f"target: {name} is on {str(tensor.device)!r}, expected the CPU: call model.to('cpu') first"
        )


def _check_finite(name: str, tensor: Tensor) -> None:
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return
    # A sum is one pass without a temporary, and only finite if no value is infinite or NaN; it may overflow though.
    values = tensor.detach()
    if not torch.isfinite(values.sum()) and not torch.isfinite(values).all():
        raise ValueError(
            f"target: {name} holds NaN or infinite values: check the checkpoint it was loaded from"
        )
