"""Find the layers that no matcher matched and that may be recorded."""

from __future__ import annotations

from torch import nn

from hf_cpu_accel.patching.fused_module import FusedModuleMixin, fused_layer
from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.rewrite.capture.program_layer import ProgramLayer
from hf_cpu_accel.rewrite.core.context import Context
from hf_cpu_accel.rewrite.core.fuse_each import fuse_each, refusal_to_fuse
from hf_cpu_accel.rewrite.core.refusal import RECORDED, Refusal
from hf_cpu_accel.rewrite.encoder.expected_layers import is_layer
from hf_cpu_accel.rewrite.linear.tensor_parallel import is_joined

_INDICES = ("layer_idx", "layer_id")  # attributes


def record_layers(context: Context) -> list[PlanItem]:
    """Record every transformer layer that is not fused."""

    def look(layer: nn.Module, path: str, context: Context) -> ProgramLayer | Refusal | None:
        if isinstance(layer, FusedModuleMixin) or not _is_called_layer(context.root, path):
            return None
        # With sums over processes between the parts, all processes would have to record and compare the same calls.
        if _is_fused_in_part(path, context) or is_joined(layer):
            return None
        reason = refusal_to_fuse(layer, path, context)
        if reason is not None:
            return Refusal(reason)
        fused: ProgramLayer = fused_layer(ProgramLayer, layer, _programs={}, _index=_index_of(layer))
        return fused

    def named(fused: ProgramLayer, path: str) -> tuple[str, str]:
        return "steps", context.dtypes.names(path, fused)

    return fuse_each(context, RECORDED, look, named, skip_children=True)


def _is_called_layer(root: nn.Module, path: str) -> bool:
    """Return whether the module is a transformer layer, or a member of one that is only a list, which is never called."""
    if is_layer(root, path):
        return not isinstance(root.get_submodule(path), nn.ModuleList)
    above = path.rpartition(".")[0]
    return isinstance(root.get_submodule(above), nn.ModuleList) and is_layer(root, above)


def _is_fused_in_part(path: str, context: Context) -> bool:
    """Return whether a layer was fused inside or around the module."""
    layers = (item for item in context.results.items if item.scope == "layer" and item.reason is None)
    names = [item.name for item in layers if item.structure != RECORDED]
    return any(name.startswith(f"{path}.") or path.startswith(f"{name}.") for name in names)


def _index_of(layer: nn.Module) -> int | None:
    """Return the index of the layer's part of a cache, or None."""
    found = {vars(part).get(name) for part in layer.modules() for name in _INDICES} - {None}
    index = found.pop() if len(found) == 1 else None
    return index if isinstance(index, int) else None
