"""`SentenceTransformer`, `CrossEncoder` and `SparseEncoder`: models of transformers with pooling and other modules."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from hf_cpu_accel.hosts.loaded import loaded
from hf_cpu_accel.hosts.models import is_transformers_model
from hf_cpu_accel.hosts.root import Root

_ENCODERS = ("SentenceTransformer", "CrossEncoder", "SparseEncoder", "MultiVectorEncoder")


def roots(target: object) -> tuple[Root, ...] | None:
    """Return the models of transformers in `target`, and its other modules with weights; None if `target` is not an encoder.

    Each is a separate root, so that an inner model is saved and loaded like any other. An encoder switches to eval mode only when
    it encodes, so the flags of its models decide for the other modules too.
    """
    if not isinstance(target, loaded("sentence_transformers", *_ENCODERS)) or not isinstance(
        target, nn.Module
    ):
        return None
    models = tuple(module for module in target.modules() if is_transformers_model(module))
    names: dict[nn.Module, str] = {}
    for name, module in _parts(target):
        names.setdefault(module, name)
    return tuple(_root(module, name, models or (target,)) for module, name in names.items())


def _parts(parent: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield (path, module) of each model below `parent`, and of other modules with weights."""
    for name, child in parent.named_children():
        below = f"{path}.{name}" if path else name
        inside = any(is_transformers_model(part) for part in child.modules())
        if inside and not is_transformers_model(child):
            yield from _parts(child, below)
        elif next(child.parameters(), None) is not None:
            yield below, child


def _root(module: nn.Module, name: str, deciding: tuple[nn.Module, ...]) -> Root:
    deciding = (module,) if is_transformers_model(module) else deciding
    return Root(module, "sentence_transformers", deciding, name)
