"""The regions of a model to compile: repeated blocks that no rule has fused into one op, or the whole model."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

from torch import Tensor, nn

from hf_cpu_accel.compiler.background.reads import structure
from hf_cpu_accel.hosts.pyg import message_passing
from hf_cpu_accel.patching.hooks import is_plain
from hf_cpu_accel.rewrite.decoder.layer import FusedDecoderLayer
from hf_cpu_accel.rewrite.encoder.layer import FusedEncoderLayer

# Compiling more kinds of blocks than this takes longer than compiling the whole model.
MAX_KINDS = 4
_WHOLE = (FusedEncoderLayer, FusedDecoderLayer)  # layers that are one op


@dataclass(frozen=True)
class RegionSearch:
    """Attributes:
    regions: {name: modules of the same structure}.
    reason: why nothing is compiled, or None.
    """

    regions: dict[str, list[nn.Module]]
    reason: str | None = None


def find_regions(root: nn.Module) -> RegionSearch:
    """Return the regions of an accelerated model."""
    modules = list(root.modules())
    if _has_graph_layers(modules):
        return RegionSearch({}, "layers of PyTorch Geometric cache values of a graph between calls")
    kinds: dict[tuple[str, str], dict[str, nn.Module]] = defaultdict(dict)
    _collect(root, "", kinds)
    regions = {_name(list(blocks)): list(blocks.values()) for blocks in kinds.values() if len(blocks) > 1}
    fused = sum(isinstance(module, _WHOLE) for module in modules)
    if regions and len(regions) <= MAX_KINDS:
        return RegionSearch(regions)
    if fused:
        return RegionSearch(
            {}, f"its {fused} layers already run as one op each, and little else is left to compile"
        )
    if any(map(_is_opaque, modules)):
        return RegionSearch(
            {}, "its convolutions have weights in oneDNN's own layout, which compilers cannot read"
        )
    if not is_plain(root):
        return RegionSearch({}, "it has hooks, or an instance attribute `forward`")
    return RegionSearch({"the model": [root]})


def _collect(module: nn.Module, path: str, kinds: dict[tuple[str, str], dict[str, nn.Module]]) -> None:
    """Collect the blocks at and below `module` into `kinds`, by container and structure."""
    repeats = isinstance(module, nn.ModuleList | nn.Sequential)
    structures = {
        name: structure(child) for name, child in module.named_children() if repeats and _is_block(child)
    }
    for name, child in module.named_children():
        child_path = f"{path}.{name}" if path else name
        if isinstance(child, _WHOLE):
            continue
        if name in structures and list(structures.values()).count(structures[name]) > 1:
            kinds[path, structures[name]][child_path] = child
        else:
            _collect(child, child_path, kinds)


def _is_block(module: nn.Module) -> bool:
    """Return whether `module` has several parts that can be compiled, none of them fused into one op."""
    parts = [part for part in module.modules() if not part._modules]
    left = any(isinstance(part, _WHOLE) or _is_opaque(part) for part in module.modules())
    return len(parts) > 2 and not left and is_plain(module) and type(module).forward is not nn.Module.forward


def _is_opaque(module: nn.Module) -> bool:
    """Return whether `module` holds tensors in oneDNN's opaque layout."""
    return any(isinstance(value, Tensor) and value.is_mkldnn for value in vars(module).values())


def _has_graph_layers(modules: list[nn.Module]) -> bool:
    layers = message_passing()
    return any(isinstance(module, layers) for module in modules)


def _name(paths: list[str]) -> str:
    return paths[0] if len(paths) == 1 else re.sub(r"\d+$", "*", paths[0])
