"""Finds the decoder layers of a model, reads what they are, proves it, and fuses them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import nn

from hf_cpu_accel.plan import PlanItem
from hf_cpu_accel.rewrite.causal_mask import CausalMask
from hf_cpu_accel.rewrite.changes import swap_module
from hf_cpu_accel.rewrite.context import Context
from hf_cpu_accel.rewrite.decoder_calls import LayerCall, Stack, stacks_of
from hf_cpu_accel.rewrite.decoder_layer import FusedDecoderLayer, Role, fuse
from hf_cpu_accel.rewrite.decoder_proof import Proof
from hf_cpu_accel.rewrite.decoder_reading import read
from hf_cpu_accel.rewrite.decoder_structure import DecoderParts
from hf_cpu_accel.rewrite.decoder_trace import DecoderTrace, trace, twin_of
from hf_cpu_accel.rewrite.hooks import forward_hooks, has_foreign_hook
from hf_cpu_accel.rewrite.rotary_source import RotaryGroups, Rotation, rotations

STRUCTURE = "decoder layer"

_LEFT = "it does something that the fused layer does not, or is watched or skipped: its parts are served one by one"

# An error that can be nothing but rounding of float32.
_EXACT = 1e-5


def fuse_decoder_layers(context: Context) -> list[PlanItem]:
    """Fuse every layer of the model that is one. To be called when the linears are packed and attention is ours."""
    items: list[PlanItem] = []
    for stack in stacks_of(context.root):
        last = stack.layers[-1][1]
        for (path, layer), role in zip(stack.layers, _roles(stack, context), strict=True):
            if role is None:
                items.append(PlanItem.left(path, STRUCTURE, _LEFT))
            else:
                role = dataclasses.replace(
                    role,
                    is_returned=layer is last and stack.returned,
                    skips_padding=context.config.padding == "skip",
                )
                swap_module(context.journal, context.slots[id(layer)], fuse(layer, role))
                items.append(PlanItem(path, STRUCTURE, "decoder_layers", context.dtype, 0, reason=None))
    return items


def _roles(stack: Stack, context: Context) -> Iterator[Role | None]:
    """The proved reading of each layer, or None for one that is left."""
    reader = _Reader()
    for (path, layer), call in zip(stack.layers, stack.calls, strict=True):
        yield reader.role(layer, call) if _may_be_fused(path, layer, context) else None


def _may_be_fused(path: str, layer: nn.Module, context: Context) -> bool:
    """Nobody asked for it to be left, and nobody watches or changes what passes inside."""
    inside = [module for module in layer.modules() if module is not layer]
    return (
        not isinstance(layer, FusedDecoderLayer)
        and bool(context.slots[id(layer)])
        and not any(context.skipped(f"{path}.{name}" if name else path) for name, _ in layer.named_modules())
        and layer._compiled_call_impl is None
        and not any("forward" in vars(module) for module in layer.modules())
        and not any(has_foreign_hook(hooks) for module in inside for hooks in forward_hooks(module))
    )


class _Reader:
    """Reads the layers of one stack, in their order."""

    def __init__(self) -> None:
        self.groups = RotaryGroups()
        self.usual: dict[
            Rotation | None, float
        ] = {}  # what layers so far were found to do, and how far that was off

    def role(self, layer: nn.Module, call: LayerCall) -> Role | None:
        with torch.no_grad():
            try:
                twin = twin_of(layer)
                seen = trace(twin, call)
            except Exception:  # unknown code: whatever it raises, it does not take what its host passes
                return None
            parts = read(twin, seen)
            if parts is None:
                return None
            mask = call.arguments[call.mask]
            # A mask of a few tokens with its values does not show a window; what attention is told does.
            window = mask.window if isinstance(mask, CausalMask) else seen.attention[0].window
            role = self._turning(dataclasses.replace(parts, window=window), layer, twin, call, seen)
            if role is None:
                return None
            proof = Proof(layer, call, seen.layer_index, None)
            return role if proof.error(role) <= proof.tolerance else None

    def _turning(
        self, parts: DecoderParts, layer: nn.Module, twin: nn.Module, call: LayerCall, seen: DecoderTrace
    ) -> Role | None:
        """The role with the use of the tables that makes `twin` right, if one does."""
        proof = Proof(twin, call, seen.layer_index, torch.float32)
        choices = [*rotations(layer, call, parts.head_dim, self.groups), None]
        choices.sort(key=lambda rotation: rotation not in self.usual)
        best, best_error, best_rotation = None, proof.tolerance, None
        for rotation in choices:
            role = _with_rotation(parts, rotation, call, seen)
            error = proof.error(role)
            if error <= best_error:
                best, best_error, best_rotation = role, error, rotation
            if error <= max(_EXACT, 4 * self.usual.get(rotation, 0.0)):
                break
        if best is None:
            return None
        self.usual.setdefault(best_rotation, best_error)
        causal = proof.error(dataclasses.replace(best, causal=True), masked=False) <= proof.tolerance
        return dataclasses.replace(best, causal=causal)


def _with_rotation(
    parts: DecoderParts, rotation: Rotation | None, call: LayerCall, seen: DecoderTrace
) -> Role:
    """The role with one way to use the tables, None being not to (SmolLM3's NoPE layers)."""
    source = None if rotation is None else rotation.source
    if rotation is not None:
        parts = dataclasses.replace(
            parts, rotary_dim=rotation.rotary_dim, rotary_interleaved=rotation.interleaved
        )
    known = (call.cache, call.mask, None if source is None else source.argument)
    return Role(
        parts=parts,
        names=call.names,
        cache=call.cache,
        mask=call.mask,
        causal=False,
        rotary=source,
        ignored=frozenset(name for name in call.arguments if name not in known and _is_set(call, name)),
        cache_index=seen.layer_index,
        outputs=seen.outputs,
        is_returned=False,
    )


def _is_set(call: LayerCall, name: str) -> bool:
    value = call.arguments[name]
    return value is not None and value is not False
