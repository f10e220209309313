"""Check that a model can be accelerated, before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hf_cpu_accel.checkpoints.exported import is_quantized_graph
from hf_cpu_accel.checkpoints.quantize_dynamic import is_inference_only
from hf_cpu_accel.checkpoints.stored import stored_weight
from hf_cpu_accel.checkpoints.stored_weight import plain_tensors
from hf_cpu_accel.guard.modules import asks_for_mode
from hf_cpu_accel.runtime.mapped_files import MappedFiles


def check_model(root: nn.Module, deciding: Iterable[nn.Module], *, adds_in_training: bool = False) -> None:
    """Raise an error for a model that cannot be accelerated.

    Args:
        root: the model.
        deciding: the modules whose `training` flags count, with all below them.
        adds_in_training: whether modules in training mode count only where they compute something else in it, if the model
            itself is in eval mode.

    Raises:
        ValueError: training mode, parameters that are elsewhere than on the CPU, have no values or not finite ones.
    """
    for module in deciding:
        _check_mode(module, only_where_it_matters=adds_in_training and not module.training)
    integers = {id(held) for module in root.modules() for held in _stored(module)}
    mapped = MappedFiles()
    for name, parameter in root.named_parameters():
        _check_initialized(name, parameter)
        _check_device(name, parameter)
        for held in plain_tensors(parameter):
            if id(held) not in integers:
                _check_finite(name, held)
            mapped.give_back(held)  # a checkpoint is read weight by weight, and never in memory as a whole
    for name, buffer in root.named_buffers():
        _check_initialized(name, buffer)
        _check_device(name, buffer)


def _stored(module: nn.Module) -> tuple[Tensor, ...]:
    """Return the tensors that store the integers of a quantized weight. Some libraries store them with a floating-point dtype."""
    weight = stored_weight(module)
    return () if weight is None else weight.tensors


def check_patterns(
    models: Sequence[tuple[str, nn.Module]], patterns: Iterable[str], *, argument: str
) -> None:
    """Raise an error if a pattern of `argument` matches no module of `models`, each under its name: it is probably a typo.

    Raises:
        ValueError: the error names the pattern.
    """
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for name, model in models for path in _paths(name, model)):
            types = " or ".join(type(model).__name__ for _, model in models)
            raise ValueError(
                f"{argument}: {pattern!r} matches no module of {types}; see model.named_modules()"
            )


def _paths(name: str, model: nn.Module) -> Iterator[str]:
    for path, _ in model.named_modules():
        yield ".".join(filter(None, (name, path)))


def _check_mode(module: nn.Module, *, only_where_it_matters: bool) -> None:
    if is_quantized_graph(module):
        return
    for name, child in module.named_modules():
        told = only_where_it_matters or is_inference_only(child)
        if child.training and (asks_for_mode(child) or not told):
            where = f"its module {name!r}" if name else type(module).__name__
            raise ValueError(
                f"target: {where} is in training mode, which is supported only for models with MessagePassing layers of PyTorch "
                "Geometric: call model.eval() first"
            )


def _check_initialized(name: str, tensor: Tensor) -> None:
    if is_lazy(tensor):
        raise ValueError(f"target: {name} is not initialized yet: run the model once first")


def _check_device(name: str, tensor: Tensor) -> None:
    if tensor.device.type == "meta":
        raise ValueError(
            f"target: {name} is on the meta device and has no values: load the model with real weights first"
        )
    if tensor.device.type != "cpu":
        raise ValueError(
            f"target: {name} is on {str(tensor.device)!r}, only 'cpu' is supported: call model.to('cpu') first"
        )


def _check_finite(name: str, tensor: Tensor) -> None:
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return
    # A sum is one pass without a temporary, and only finite if no value is infinite or NaN; it may overflow though.
    values = (
        tensor.detach() if tensor.itemsize > 1 else tensor.detach().float()
    )  # torch has no sums in 8 bits
    if not torch.isfinite(values.sum()) and not torch.isfinite(values).all():
        raise ValueError(
            f"target: {name} has NaN or infinite values: check the checkpoint it was loaded from"
        )
