"""Find the encoder layers of a model and fuse them, by their computation instead of their class or names."""

from __future__ import annotations

from functools import partial

from torch import nn

from hf_cpu_accel.hosts.arguments import parameter_names, takes_cache
from hf_cpu_accel.patching.hooks import forward_hooks, has_foreign_hook
from hf_cpu_accel.plan import PlanItem, Structure
from hf_cpu_accel.rewrite.core.context import Context
from hf_cpu_accel.rewrite.core.fuse_each import fuse_each
from hf_cpu_accel.rewrite.core.refusal import Refusal
from hf_cpu_accel.rewrite.encoder.arguments import passed_names
from hf_cpu_accel.rewrite.encoder.call_form import SEQUENCES
from hf_cpu_accel.rewrite.encoder.disentangled_layer import FusedDisentangledLayer, is_disentangled
from hf_cpu_accel.rewrite.encoder.disentangled_match import match_disentangled
from hf_cpu_accel.rewrite.encoder.expected_layers import is_layer
from hf_cpu_accel.rewrite.encoder.layer import BOTH_ENDS, FusedEncoderLayer, fuse
from hf_cpu_accel.rewrite.encoder.match import match_layer
from hf_cpu_accel.rewrite.encoder.packed_layer import FusedPackedLayer
from hf_cpu_accel.rewrite.linear.layer import PERMUTED, PackedLinear, is_permuted
from hf_cpu_accel.rewrite.linear.tensor_parallel import BETWEEN, is_joined
from hf_cpu_accel.rewrite.norm.match import identify_norm

STRUCTURE = Structure("encoder layer")

_FEWEST, _MOST = 4, 7  # linears of a layer
_OF_POSITIONS = 2  # additional ones of disentangled attention
_NEIGHBORS = "sinusoidal_pos"  # RoFormer's tables


def fuse_encoder_layers(context: Context) -> list[PlanItem]:
    """Fuse every encoder layer of the model. Call it after linears are packed and attention is replaced."""

    def named(fused: FusedEncoderLayer, path: str) -> tuple[str, str]:
        return "encoder_layer", context.dtypes.names(path, fused)

    return fuse_each(context, STRUCTURE, _match_encoder_layer, named, skip_children=True, expected=is_layer)


def _match_encoder_layer(layer: nn.Module, path: str, context: Context) -> FusedEncoderLayer | Refusal | None:
    """Return the layer with the fused forward if both agree; None if it has no attention."""
    if not _holds_attention(layer):
        return None
    if any(context.skipped(f"{path}.{name}" if name else path) for name, _ in layer.named_modules()):
        return Refusal("skip_modules")
    packed, disentangled = SEQUENCES in passed_names(layer), is_disentangled(parameter_names(layer.forward))
    kind, match = fuse, match_layer
    if packed:
        kind = partial(fuse, fused_class=FusedPackedLayer)
    elif disentangled:
        kind, match = partial(fuse, fused_class=FusedDisentangledLayer), match_disentangled
    attempted = partial(kind, skips_padding=False, bf16_intermediates=False)
    matched = _structure_refusal(layer, _MOST + _OF_POSITIONS * disentangled) or match(layer, attempted)
    if isinstance(matched, Refusal):
        return matched
    fused = kind(layer, *matched, skips_padding=context.config.padding == "skip" and not packed)
    if fused._skips_padding:
        fused._computed_ends = BOTH_ENDS  # until it is known who reads padding
    return fused


def _holds_attention(module: nn.Module) -> bool:
    """Return whether the module has at least as many linears as a layer."""
    if isinstance(module, FusedEncoderLayer):
        return False
    return sum(isinstance(child, PackedLinear) for child in module.modules()) >= _FEWEST


def _structure_refusal(module: nn.Module, most: int) -> Refusal | None:
    """Return a refusal from the structure alone: its arguments, more than `most` linears, or hooks inside."""
    inside = [child for child in module.modules() if child is not module]
    names = parameter_names(module.forward)
    linears = sum(isinstance(child, PackedLinear) for child in inside)
    norms = sum(identify_norm(child) is not None for child in module.modules())
    if module._compiled_call_impl is not None or any("forward" in vars(m) for m in module.modules()):
        return Refusal("its forward, or that of a module in it, is replaced or compiled")
    if names[:1] != ("hidden_states",):
        first = names[0] if names else "any arguments"
        return Refusal(f"the first argument of its forward is {first}, not hidden_states", yields=True)
    if takes_cache(names) and any(vars(child).get("is_causal") is True for child in inside):
        # The attribute that transformers reads. Calling each layer of a large decoder would show the same, but take long.
        return Refusal("its attention is causal", yields=True)
    if _NEIGHBORS in names:
        return Refusal(
            "its rotary embedding rotates adjacent features (sinusoidal_pos), which is not supported"
        )
    if linears > most:
        return Refusal(
            f"it has {linears} linears; self-attention with a feed-forward network has {_FEWEST} to {most}",
            yields=True,
        )
    if any(has_foreign_hook(hooks) for child in inside for hooks in forward_hooks(child)):
        return Refusal("modules in it have hooks")
    if is_permuted(module):
        return Refusal(PERMUTED)
    if is_joined(module):
        return Refusal(BETWEEN, yields=True)
    if norms not in (1, 2):
        return Refusal(f"it has {norms} norms; an encoder layer has one or two", yields=True)
    if any(True for _ in module.buffers()):
        return Refusal("it has buffers that may affect its output", yields=True)
    return None
