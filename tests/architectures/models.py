"""The model of a config, with random weights that show errors."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from tests.architectures.small import exceptions

LARGEST = 110_000_000  # parameters


def classes_of(model_type: str, config: PretrainedConfig) -> list[type[PreTrainedModel]]:
    """Those that are built from such a config: the base model first, then its heads, then what it is a part of."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    found: list[type[PreTrainedModel]] = []
    wanted = exceptions().get(model_type, {}).get("class")
    for module in _modeling(type(config)):
        members = [m for _, m in inspect.getmembers(module, inspect.isclass)]
        members = [m for m in members if issubclass(m, PreTrainedModel) and m.__module__ == module.__name__]
        own = [
            m
            for m in members
            if m.config_class is type(config) and not m.__name__.endswith("PreTrainedModel")
        ]
        found += sorted(own, key=_rank)
    try:
        mapped = MODEL_MAPPING[type(config)]
        mapped = mapped if isinstance(mapped, tuple) else (mapped,)
        found = [*mapped, *found]
    except (
        KeyError,
        ValueError,
    ):  # a ValueError: the mapping of this transformers names a class that it does not have
        pass
    if wanted:
        found = [m for m in found if m.__name__ == wanted]
    return list(dict.fromkeys(found))


def _rank(cls: type) -> tuple[bool, bool, str]:
    return ("For" in cls.__name__, not cls.__name__.endswith("Model"), cls.__name__)


def _modeling(config_class: type[PretrainedConfig]) -> Iterator[Any]:
    """The modules beside that of the config which hold models."""
    package = config_class.__module__.rpartition(".")[0]
    folder = Path(importlib.import_module(package).__file__ or "").parent
    for file in sorted(folder.glob("modeling_*.py")):
        try:
            yield importlib.import_module(f"{package}.{file.stem}")
        except ImportError:
            continue


def build(cls: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    """Raises:
    ValueError: it is too large for this test.
    """
    try:
        with torch.device("meta"):
            size = sum(p.numel() for p in cls(_copy(config)).parameters())
    except Exception as error:
        if "meta" not in str(error):
            raise
        size = 0  # it cannot be built there; the memory of the process is limited
    if size > LARGEST:
        raise ValueError(f"{size / 1e6:.0f} M parameters")
    torch.manual_seed(0)
    model = cls(_copy(config)).eval().float()
    randomize(model)
    return model


def _copy(config: PretrainedConfig) -> PretrainedConfig:
    import copy

    return copy.deepcopy(config)


@torch.no_grad()
def randomize(model: nn.Module) -> None:
    """Matrices that keep the size of what passes through them, gains around one, biases that are not zero."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() >= 2:
            fan_in = parameter[0].numel() if parameter.dim() != 3 else parameter.shape[-1]
            noise *= min(0.3, 1 / math.sqrt(max(fan_in, 1)))
            parameter.copy_(noise)
        elif name.endswith("bias"):
            parameter.copy_(0.1 * noise)
        elif (
            parameter.numel() and parameter.float().abs().max() < 0.05
        ):  # a gain that hides what it multiplies
            parameter.copy_(0.5 + 0.1 * noise)
        else:
            parameter.copy_(parameter + 0.1 * noise * parameter.abs().clamp_min(0.1))
    for name, buffer in model.named_buffers():
        if name.endswith("running_var"):
            buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))
        elif name.endswith("running_mean"):
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
