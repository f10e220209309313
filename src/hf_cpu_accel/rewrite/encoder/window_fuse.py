"""Find the layers of a model that attend within windows of an image, and fuse them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.hosts.arguments import parameters_of
from hf_cpu_accel.patching.fused_module import fused_layer
from hf_cpu_accel.plan import PlanItem, Structure
from hf_cpu_accel.rewrite.core.context import Context
from hf_cpu_accel.rewrite.core.foreign_code import call_foreign
from hf_cpu_accel.rewrite.core.fuse_each import fuse_each, refusal_to_fuse
from hf_cpu_accel.rewrite.core.refusal import Refusal, Refused, required
from hf_cpu_accel.rewrite.core.shadow_copy import Shadow
from hf_cpu_accel.rewrite.encoder.arguments import hidden_states_of
from hf_cpu_accel.rewrite.encoder.candidates import candidates, known_parameters, layer_scale_of
from hf_cpu_accel.rewrite.encoder.expected_layers import is_layer
from hf_cpu_accel.rewrite.encoder.parts import EncoderLayerParts
from hf_cpu_accel.rewrite.encoder.trace import LayerTrace
from hf_cpu_accel.rewrite.encoder.window_layer import FusedWindowLayer, alike, compute
from hf_cpu_accel.rewrite.linear.layer import PERMUTED, PackedLinear, is_permuted
from hf_cpu_accel.rewrite.norm.match import identify_norm

STRUCTURE = Structure("window encoder layer")

_PARAMETERS = ("hidden_states", "input_dimensions")
# The side of the image that shows the size of a window: larger than most windows, since a layer shrinks them to fit.
_SIDE = 32


def fuse_window_layers(context: Context) -> list[PlanItem]:
    """Fuse every such layer of the model. Call it after linears are packed and attention is replaced."""

    def named(fused: FusedWindowLayer, path: str) -> tuple[str, str]:
        return "encoder_layer", context.dtypes.names(path, fused)

    return fuse_each(context, STRUCTURE, _match_window_layer, named, expected=is_layer)


def _match_window_layer(layer: nn.Module, path: str, context: Context) -> FusedWindowLayer | Refusal | None:
    if not _may_be_layer(layer):
        return None
    reason = refusal_to_fuse(layer, path, context) or (PERMUTED if is_permuted(layer) else None)
    return _fuse_window_layer(layer) if reason is None else Refusal(reason)


def _may_be_layer(module: nn.Module) -> bool:
    if isinstance(module, FusedWindowLayer) or tuple(parameters_of(module.forward))[:2] != (_PARAMETERS):
        return False
    linears = sum(isinstance(child, PackedLinear) for child in module.modules())
    norms = sum(identify_norm(child) is not None for child in module.modules())
    return 4 <= linears <= 6 and norms == 2


def _fuse_window_layer(layer: nn.Module) -> FusedWindowLayer | Refusal:
    """Return the layer with the fused forward, if both agree on small images.

    Raises:
        Refused: it rejects the arguments of such a layer.
    """
    width = next(m.in_features for m in layer.modules() if isinstance(m, PackedLinear))
    dtype = next((p.dtype for p in layer.parameters() if p.is_floating_point()), torch.float32)
    refusal = Refusal("its linears and norms do not match window attention with a feed-forward network")
    shadow = Shadow(layer)
    tried = shadow.module
    with torch.no_grad(), shadow.running():
        side = _side(tried, width, dtype)
        image = torch.randn(2, side * side, width, generator=torch.Generator().manual_seed(1)).to(dtype)
        expected = hidden_states_of(_run(tried, side, image))
        for parts, outputs in _matches(tried, side, width, dtype):
            fuse: Callable[..., FusedWindowLayer] = partial(
                fused_layer,
                FusedWindowLayer,
                _tuple=outputs,
                _tables=tuple(_bias_tables(tried, parts)),
                _followed=tuple(name for name, value in vars(layer).items() if type(value) is int),
                _bound=None,
            )
            fused = fuse(tried, _parts=parts, _known={})
            windows = fused.learn(image[:1], partial(_run, tried, side))
            if windows is None:
                refusal = Refusal("its windows are not a permutation of the image's tokens")
                continue
            output = compute(image, windows, parts.weights(bf16_intermediates=False).bind())
            if alike(parts, output, expected, dtype):
                return fuse(layer, _parts=parts.moved(shadow.original, layer_scale_of(layer)), _known={})
            refusal = Refusal("its output does not match its linears, norms and windows")
    return refusal


class _Stop(BaseException):
    """Stops a forward after the needed call; no `except Exception` may catch it."""


def _side(layer: nn.Module, width: int, dtype: torch.dtype) -> int:
    """Return the side of an image of two by two windows."""
    sizes: list[int] = []

    def look(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        sizes.append(args[0].shape[-2])
        raise _Stop

    first = next(m for m in layer.modules() if isinstance(m, PackedLinear))
    before = {name: value for name, value in vars(layer).items() if type(value) is int}
    hook = first.register_forward_pre_hook(look)
    try:
        _run(layer, _SIDE, torch.zeros(1, _SIDE * _SIDE, width, dtype=dtype))
    except _Stop:
        pass
    finally:
        hook.remove()
        vars(layer).update(before)  # it may have adapted its attributes to the image
    if not sizes:
        raise Refused(Refusal("it does not call its first linear"))
    return 2 * round(sizes[0] ** 0.5)


def _matches(
    layer: nn.Module, side: int, width: int, dtype: torch.dtype
) -> Iterator[tuple[EncoderLayerParts, int | None]]:
    """Yield the possible parts of the layer, and the length of the tuple that it returns."""
    trace = LayerTrace(layer)
    image = torch.randn(1, side * side, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    with trace:
        output = _run(layer, side, image)
    outputs = len(output) if isinstance(output, tuple) else None
    if outputs is not None and any(value is not None for value in output[1:]):
        raise Refused(Refusal("it returns more than hidden states"))
    if len(trace.attention) != 1:
        raise Refused(Refusal(f"it calls attention {len(trace.attention)} times, expected once"))
    for parts in candidates(layer, trace):
        tables = [layer.get_parameter(path) for path in _bias_tables(layer, parts)]
        if all(table.dim() == 2 and table.shape[1] == parts.attention.heads for table in tables):
            yield replace(parts, relative=None), outputs


def _run(layer: nn.Module, side: int, hidden_states: Tensor) -> Any:
    """Return the output of the layer.

    Raises:
        Refused: the layer rejects the arguments, or returns no hidden states.
    """
    output = required(call_foreign(layer, hidden_states, (side, side)))
    states = hidden_states_of(output)
    if not isinstance(states, Tensor) or states.shape != hidden_states.shape:
        raise Refused(Refusal("it does not return hidden states of the input's shape"))
    return output


def _bias_tables(layer: nn.Module, parts: EncoderLayerParts) -> list[str]:
    """Return the paths of the parameters that belong to no linear and no norm: those of the relative position bias."""
    known = known_parameters(layer) | {id(gain) for gain in parts.layer_scale or ()}
    return [path for path, parameter in layer.named_parameters() if id(parameter) not in known]
