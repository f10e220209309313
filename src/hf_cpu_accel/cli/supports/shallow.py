"""Build a model from a config with few layers, at least one of each kind, in their full sizes.

Equal layers are fused equally, so that one of each kind is enough.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_cpu_accel.cli.random_models import seeded

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_COUNTS = re.compile(r"(layers?|depths?|blocks|n_layer)$")
_EXPERTS = re.compile(r"^(moe_)?(num|n)_(local_|routed_)?experts$")
_IDS = re.compile(r"_ids?$")
_FEWEST = 2  # the first and the last layer may differ from the others
_WORDS = 4096  # size of the vocabulary, which does not matter for fusing
_FEWEST_EXPERTS = 16
_GENERAL = ("AutoModel", "AutoModelForCausalLM")


@dataclass(frozen=True)
class Shallow:
    """A model with random weights, and the full number of layers of each list, {path: number}."""

    model: PreTrainedModel
    depths: dict[str, int]


def shallow(config: PreTrainedConfig, memory: int) -> Shallow:
    """Build the shallow model, in the dtype of the config or in bfloat16.

    Args:
        config: config of the full model.
        memory: maximum size of the weights in bytes.

    Raises:
        ValueError: transformers builds no model from the config, or the shallow model is too large.
    """
    full = _on_meta(config)
    depths = {path: len(layers) for path, layers in _stacks(full)}
    needed = max((_kinds_shown_by(layers) for _, layers in _stacks(full)), default=_FEWEST)
    small = type(config).from_dict(_cut(config.to_dict(), max(needed, _FEWEST), []))
    small.architectures = config.architectures
    empty = _on_meta(small)
    parameters = sum(parameter.numel() for parameter in empty.parameters())
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    if parameters * dtype.itemsize > memory:
        dtype = torch.bfloat16
    nbytes = parameters * dtype.itemsize
    if nbytes > memory:
        raise ValueError(
            f"the {max(needed, _FEWEST)} layers that contain each kind take {nbytes / 1e9:.1f} GB, but only "
            f"{memory / 1e9:.1f} GB may be used; stop other programs"
        )
    return Shallow(seeded(lambda: type(empty)._from_config(small, dtype=dtype)), depths)


def _on_meta(config: PreTrainedConfig) -> PreTrainedModel:
    """Return the model on the meta device, without weights.

    Raises:
        ValueError: transformers builds no model from the config.
    """
    import transformers

    failure: Exception | None = None
    for name in (*(config.architectures or ()), *_GENERAL):
        cls = getattr(transformers, name, None)
        if cls is None:
            continue
        make = cls.from_config if name in _GENERAL else cls._from_config
        try:
            with torch.device("meta"):
                return make(copy.deepcopy(config))
        except Exception as error:
            failure = failure or error
    raise ValueError(
        f"transformers builds no model from a config of type {config.model_type!r}: {failure}"
    ) from failure


def _stacks(model: nn.Module) -> Iterator[tuple[str, nn.ModuleList]]:
    """Yield (path, list) of the lists of layers that are not inside of another list."""
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleList):
            yield name, child
        else:
            yield from ((f"{name}.{path}", layers) for path, layers in _stacks(child))


def _kinds_shown_by(layers: nn.ModuleList) -> int:
    """Return the least number of first layers that contain each kind of layer."""
    first: dict[Any, int] = {}
    for number, layer in enumerate(layers):
        first.setdefault(_kind(layer), number)
    return max(first.values(), default=0) + 1


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    """Return a key of the classes and settings of the modules, and of the shapes of their parameters."""
    settings = (
        tuple(sorted((name, value) for name, value in vars(module).items() if isinstance(value, bool | str)))
        for module in layer.modules()
    )
    shapes = ((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())
    return (*map(type, layer.modules()), *settings, *shapes)


def _cut(fields: dict[str, Any], depth: int, ids: list[int]) -> dict[str, Any]:
    """Return the fields of a config with at most `depth` layers, a smaller vocabulary and fewer experts.

    Args:
        fields: fields of the config.
        depth: maximum number of layers.
        ids: token ids that were moved so far; each gets another place at the end of the smaller vocabulary.
    """
    counts = {value for name, value in fields.items() if _COUNTS.search(name) and type(value) is int}
    cut: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict) and (name.endswith("config") or "model_type" in value):
            cut[name] = _cut(value, depth, ids)
        elif _COUNTS.search(name) and type(value) is int:
            cut[name] = min(value, depth)
        elif _COUNTS.search(name) and isinstance(value, list) and all(type(v) is int for v in value):
            cut[name] = [min(number, depth) for number in value]
        elif isinstance(value, list) and len(value) in counts and len(value) > depth:
            cut[name] = value[:depth]  # one of each layer
        elif "vocab" in name and type(value) is int:
            cut[name] = min(value, _WORDS)
        elif _EXPERTS.search(name) and type(value) is int:
            groups = fields.get("n_group") or 1
            cut[name] = min(value, groups * max(2, -(-_FEWEST_EXPERTS // groups)))
        elif _IDS.search(name):
            cut[name] = [_move(v, ids) for v in value] if isinstance(value, list) else _move(value, ids)
        else:
            cut[name] = value
    return cut


def _move(value: Any, ids: list[int]) -> Any:
    """Return a token id inside of the smaller vocabulary."""
    if type(value) is not int or value < _WORDS - 64:
        return value
    if value not in ids:
        ids.append(value)
    return _WORDS - 1 - ids.index(value) % 64
