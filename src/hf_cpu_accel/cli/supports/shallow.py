"""A model of a config's own widths with as few layers as show all kinds of them: what is fused of one layer is of all like it."""

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
_FEWEST = 2  # the first and the last of a stack may differ from those between
_WORDS = 4096  # of the vocabulary: tables are looked up, and nothing about them depends on their length
_FEWEST_EXPERTS = 16
_GENERAL = ("AutoModel", "AutoModelForCausalLM")


@dataclass(frozen=True)
class Shallow:
    """A model with random weights, and how many layers each of its lists would have: {path: number}."""

    model: PreTrainedModel
    depths: dict[str, int]


def shallow(config: PreTrainedConfig, memory: int) -> Shallow:
    """
    Args:
        memory: bytes that its weights may take.

    Raises:
        ValueError: no class of transformers is built from the config, or even the shallow model is too large.
    """
    full = _on_meta(config)
    depths = {path: len(layers) for path, layers in _stacks(full)}
    needed = max((_kinds_shown_by(layers) for _, layers in _stacks(full)), default=_FEWEST)
    small = type(config).from_dict(_cut(config.to_dict(), max(needed, _FEWEST), []))
    small.architectures = config.architectures
    made = _on_meta(small)
    parameters = sum(parameter.numel() for parameter in made.parameters())
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    if parameters * dtype.itemsize > memory:
        dtype = torch.bfloat16
    nbytes = parameters * dtype.itemsize
    if nbytes > memory:
        limit = f"{memory / 1e9:.1f} GB may be used"
        raise ValueError(
            f"the {max(needed, _FEWEST)} layers that show all kinds take {nbytes / 1e9:.1f} GB, and {limit}"
        )
    return Shallow(seeded(lambda: type(made)._from_config(small, dtype=dtype)), depths)


def _on_meta(config: PreTrainedConfig) -> PreTrainedModel:
    """The model without weights.

    Raises:
        ValueError: as `shallow`.
    """
    import transformers

    failure: Exception | None = None
    for name in (*(config.architectures or ()), *_GENERAL):
        found = getattr(transformers, name, None)
        if found is None:
            continue
        make = found.from_config if name in _GENERAL else found._from_config
        try:
            with torch.device("meta"):
                return make(copy.deepcopy(config))
        except Exception as error:
            failure = failure or error
    raise ValueError(f"transformers builds no model from a config of type {config.model_type!r}") from failure


def _stacks(model: nn.Module) -> Iterator[tuple[str, nn.ModuleList]]:
    """The lists of layers that are not in a layer of another list."""
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleList):
            yield name, child
        else:
            yield from ((f"{name}.{path}", layers) for path, layers in _stacks(child))


def _kinds_shown_by(layers: nn.ModuleList) -> int:
    """Of how many layers from the first one on, each kind of layer has been seen."""
    seen: dict[Any, int] = {}
    for number, layer in enumerate(layers):
        seen.setdefault(_kind(layer), number)
    return max(seen.values(), default=0) + 1


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    """What its modules are and are told to do, and the shapes of their parameters."""
    told = (
        tuple(sorted((name, value) for name, value in vars(module).items() if isinstance(value, bool | str)))
        for module in layer.modules()
    )
    shapes = ((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())
    return (*map(type, layer.modules()), *told, *shapes)


def _cut(fields: dict[str, Any], depth: int, ids: list[int]) -> dict[str, Any]:
    """The fields of a config with no more layers than `depth`, and fewer words and experts.

    Args:
        ids: of tokens that had to be moved so far; each gets another place at the end of the vocabulary.
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
            cut[name] = [_moved(v, ids) for v in value] if isinstance(value, list) else _moved(value, ids)
        else:
            cut[name] = value
    return cut


def _moved(value: Any, ids: list[int]) -> Any:
    if type(value) is not int or value < _WORDS - 64:
        return value
    if value not in ids:
        ids.append(value)
    return _WORDS - 1 - ids.index(value) % 64
