"""Find the layers of a model with row and column biases, and fuse them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.check import compare
from hf_cpu_accel.hosts.arguments import parameter_names
from hf_cpu_accel.packing.linear import QUANTIZED
from hf_cpu_accel.patching.fused_module import FusedModuleMixin, fused_layer
from hf_cpu_accel.plan import PlanItem, Structure
from hf_cpu_accel.rewrite.core.context import Context
from hf_cpu_accel.rewrite.core.foreign_code import call_foreign
from hf_cpu_accel.rewrite.core.fuse_each import fuse_each, refusal_to_fuse
from hf_cpu_accel.rewrite.core.refusal import Refusal
from hf_cpu_accel.rewrite.core.shadow_copy import Shadow
from hf_cpu_accel.rewrite.encoder.arguments import hidden_states_of
from hf_cpu_accel.rewrite.encoder.candidates import known_parameters
from hf_cpu_accel.rewrite.encoder.expected_layers import is_layer
from hf_cpu_accel.rewrite.encoder.grid_layer import FusedGridLayer, GridParts
from hf_cpu_accel.rewrite.encoder.trace import LayerTrace
from hf_cpu_accel.rewrite.linear.layer import PERMUTED, PackedLinear, is_permuted
from hf_cpu_accel.rewrite.norm.match import identify_norm
from hf_cpu_accel.tolerance import ENCODER_LAYER, FEW_ROWS

STRUCTURE = Structure("grid encoder layer")

# Height and width: different, and no multiple of a window. The first selects the candidate, the second has several windows.
_SMALL, _LARGE = (9, 10), (17, 19)
_OTHER = Refusal("it does not match attention with row and column biases and a feed-forward network")


def fuse_grid_layers(context: Context) -> list[PlanItem]:
    """Fuse every such layer of the model. Call it after linears are packed."""

    def named(fused: FusedGridLayer, path: str) -> tuple[str, str]:
        return "linear, attention, ffn", context.dtypes.names(path, fused)

    return fuse_each(context, STRUCTURE, _match_grid_layer, named, skip_children=True, expected=is_layer)


def _match_grid_layer(layer: nn.Module, path: str, context: Context) -> FusedGridLayer | Refusal | None:
    tables = _tables(layer)
    if tables is None:
        return None
    reason = refusal_to_fuse(layer, path, context) or (PERMUTED if is_permuted(layer) else None)
    return _fuse_grid_layer(layer, tables) if reason is None else Refusal(reason)


def _tables(layer: nn.Module) -> tuple[str, ...] | None:
    """Return the paths of the two tables, if there are any, of a layer with four linears, two norms and no other parameters;
    None for another layer."""
    if isinstance(layer, FusedModuleMixin) or parameter_names(layer.forward)[:1] != ("hidden_states",):
        return None
    modules = list(layer.modules())
    if sum(isinstance(module, PackedLinear) for module in modules) != 4:
        return None
    if sum(identify_norm(module) is not None for module in modules) != 2:
        return None
    known = known_parameters(layer)
    found = {path: p for path, p in layer.named_parameters() if id(p) not in known}
    odd = all(p.dim() == 2 and p.shape[0] % 2 == 1 for p in found.values())
    alike = len({p.shape[1:] for p in found.values()}) <= 1
    return tuple(found) if len(found) in (0, 2) and odd and alike else None


def _fuse_grid_layer(layer: nn.Module, tables: tuple[str, ...]) -> FusedGridLayer | Refusal:
    """Return the layer with the fused forward, if both agree on small images."""
    shadow = Shadow(layer)
    tried = shadow.module
    with torch.no_grad(), shadow.running():
        _set_at_random(tried, tables)
        for channels_first in (False, True):
            image = _image(tried, _SMALL, channels_first=channels_first)
            expected = call_foreign(tried, image)
            states = hidden_states_of(expected)
            if isinstance(states, Tensor) and states.shape == image.shape:
                break
        else:
            return Refusal("it does not map an image to an image of the same shape", yields=True)
        if isinstance(expected, tuple) and any(value is not None for value in expected[1:]):
            return Refusal("it returns more than hidden states")
        outputs = len(expected) if isinstance(expected, tuple) else None
        for parts in _candidates(tried, tables, image, channels_first=channels_first, outputs=outputs):
            fused = _as_fused(tried, parts)
            if not _alike(tried, fused(image), expected):
                continue
            image = _image(tried, _LARGE, channels_first=channels_first)
            return _as_fused(layer, parts) if _alike(tried, fused(image), tried(image)) else _OTHER
    return _OTHER


def _set_at_random(layer: nn.Module, tables: tuple[str, ...]) -> None:
    """Set the tables of a shadow at random: before training they are zeros, which have no effect."""
    for number, path in enumerate(tables):
        owner, _, name = path.rpartition(".")
        shape, dtype = layer.get_parameter(path).shape, layer.get_parameter(path).dtype
        values = 0.3 * torch.randn(shape, generator=torch.Generator().manual_seed(number)).to(dtype)
        layer.get_submodule(owner)._parameters[name] = nn.Parameter(values, requires_grad=False)


def _image(layer: nn.Module, sides: tuple[int, int], *, channels_first: bool) -> Tensor:
    first = next(m for m in layer.modules() if isinstance(m, PackedLinear))
    dtype = next(p.dtype for p in layer.parameters() if p.is_floating_point())
    generator = torch.Generator().manual_seed(1)
    image = torch.randn(2, *sides, first.in_features, generator=generator).to(dtype)
    return image.permute(0, 3, 1, 2) if channels_first else image


def _candidates(
    layer: nn.Module, tables: tuple[str, ...], image: Tensor, *, channels_first: bool, outputs: int | None
) -> Iterator[GridParts]:
    """Yield the possible parts of a layer that calls its linears and norms in that order."""
    trace, shapes = LayerTrace(layer), []
    linears = [module for module in layer.modules() if isinstance(module, PackedLinear)]
    hooks = [
        linear.register_forward_pre_hook(lambda _, args: shapes.append(args[0].shape)) for linear in linears
    ]
    with trace:
        layer(image)
    for hook in hooks:
        hook.remove()
    if len(trace.linears) != 4 or len(trace.norms) != 2 or not shapes or len(shapes[0]) != 4:
        return
    # Windows are squares, the image is not.
    window = shapes[0][1] if shapes[0][1] == shapes[0][2] else 0
    paths = {id(module): path for path, module in layer.named_modules()}
    qkv, output, up, down = (paths[id(linear)] for linear in trace.linears)
    call = trace.attention[0] if trace.attention else None
    if not tables and call is None:
        return
    head_size = layer.get_parameter(tables[0]).shape[1] if call is None else call.head_size
    norm, ffn_norm = (paths[id(module)] for module in trace.norms)
    for activation, ordered in itertools.product(trace.activations, dict.fromkeys((tables, tables[::-1]))):
        yield GridParts(
            attention_norm=norm,
            qkv=qkv,
            head_size=head_size,
            tables=ordered,
            output=output,
            ffn_norm=ffn_norm,
            up=up,
            down=down,
            activation=activation,
            window=window,
            channels_first=channels_first,
            outputs=outputs,
        )


def _as_fused(layer: nn.Module, parts: GridParts) -> FusedGridLayer:
    fused: FusedGridLayer = fused_layer(FusedGridLayer, layer, _parts=parts, _bound=None)
    return fused


def _alike(layer: nn.Module, output: Any, expected: Any) -> bool:
    """Return whether the images agree; the features of each token are in the last dimension."""
    quantizes = any(m.packed.dtype in QUANTIZED for m in layer.modules() if isinstance(m, PackedLinear))
    comparison = compare(hidden_states_of(output), hidden_states_of(expected))
    return comparison.within(ENCODER_LAYER, few=FEW_ROWS if quantizes else 1.0)
