"""Check that the models of a target can be accelerated, before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hf_cpu_accel.checkpoints.exported import is_quantized_graph
from hf_cpu_accel.checkpoints.quantize_dynamic import is_inference_only
from hf_cpu_accel.checkpoints.stored import plain_weights
from hf_cpu_accel.config import CPUAccelConfig
from hf_cpu_accel.guard.modules import asks_for_mode
from hf_cpu_accel.hosts.root import Root
from hf_cpu_accel.patching.acceleration import accelerated_parts
from hf_cpu_accel.rewrite.core.packed_module import PackedModule


def check_models(roots: Iterable[Root]) -> None:
    """Raise an error if one of the models cannot be accelerated.

    Raises:
        ValueError: a part of an accelerated model, training mode, or parameters that are elsewhere than on the CPU, have no values,
            or not finite ones.
    """
    for root in roots:
        check_whole(root.module)
        for module in root.deciding:
            # Where the host adds modules, their mode matters only if they compute something else in it.
            _check_mode(module, only_where_it_matters=root.adds_in_training and not module.training)
        for name, tensor in (*root.module.named_parameters(), *root.module.named_buffers()):
            _check_place(name, tensor)
        for name, weight in plain_weights(root.module):
            _check_finite(name, weight)


def check_whole(module: nn.Module) -> None:
    """Raise an error for a part of an accelerated model.

    Raises:
        ValueError: `module` has packed layers but was not accelerated itself.
    """
    if belongs_to_accelerated(module):
        raise ValueError(
            f"target is a {type(module).__name__} inside of an accelerated model: explain or restore the whole model"
        )


def belongs_to_accelerated(root: nn.Module) -> bool:
    """Return whether `root` has packed layers but was not accelerated itself, nor any part of it."""
    if accelerated_parts(root):
        return False
    return any(isinstance(module, PackedModule) for module in root.modules())


def check_patterns(roots: Sequence[Root], settings: CPUAccelConfig) -> None:
    """Raise an error for a pattern of the settings that matches no module of the models, which is probably a typo.

    Raises:
        ValueError: the error names the pattern.
    """
    for argument, patterns in (("skip_modules", settings.skip_modules), ("dtypes", dict(settings.dtypes))):
        for pattern in patterns:
            if not any(fnmatchcase(path, pattern) for root in roots for path in _paths(root)):
                types = " or ".join(type(root.module).__name__ for root in roots)
                raise ValueError(
                    f"{argument}: {pattern!r} matches no module of {types}; see model.named_modules()"
                )


def _paths(root: Root) -> Iterator[str]:
    for path, _ in root.module.named_modules():
        yield ".".join(filter(None, (root.name, path)))


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


def _check_place(name: str, tensor: Tensor) -> None:
    if is_lazy(tensor):
        raise ValueError(f"target: {name} is not initialized yet: run the model once first")
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
