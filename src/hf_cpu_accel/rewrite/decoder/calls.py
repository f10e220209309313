"""Record how a model calls its layers: run a short prompt, and keep the arguments of each layer."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.hosts.arguments import cache_argument, parameter_names, parameters_of
from hf_cpu_accel.hosts.models import pretrained_models
from hf_cpu_accel.rewrite.core.foreign_code import attempt, call_foreign
from hf_cpu_accel.rewrite.core.refusal import Refusal
from hf_cpu_accel.rewrite.core.shadow_copy import Shadow
from hf_cpu_accel.rewrite.decoder.prompt import ENCODER, ENCODER_MASK, prompt_for
from hf_cpu_accel.rewrite.linear.layer import PackedLinear


@dataclass(frozen=True)
class LayerCall:
    """The arguments of one call of a layer, by the names of its parameters.

    Attributes:
        names: of the parameters of its forward after hidden_states, in their order.
        cache: name of the KV cache argument.
        mask: name of the attention mask.
        rotary: name of the (cos, sin) tables, or None if the layer gets none.
        encoder, encoder_mask: names of the encoder output for cross-attention and of its mask; None if the layer gets none.
        hidden_states: the first argument, which is positional.
        shared: name of a mapping in which layers find keys and values of earlier ones, or None if the layer gets none.
    """

    hidden_states: Tensor
    names: tuple[str, ...]
    arguments: dict[str, Any]
    cache: str
    mask: str
    rotary: str | None
    encoder: str | None
    encoder_mask: str | None
    shared: str | None = None


@dataclass(frozen=True)
class Stack:
    """Layers that `owner` calls one after another.

    Attributes:
        layers: (path below the root, module), in the order of the calls.
        calls: one per layer, from a prompt whose first sequence is padded on the left by two tokens. The encoder output of the
            second sequence is padded on the right.
        returned: whether the owner returns the output of the last layer unchanged.
    """

    owner: nn.Module
    layers: tuple[tuple[str, nn.Module], ...]
    calls: tuple[LayerCall, ...]
    returned: bool


@dataclass(frozen=True)
class RefusedStack:
    """Layers that take a KV cache, but that their model does not call like decoder layers."""

    layers: tuple[tuple[str, nn.Module], ...]
    refusal: Refusal


def stacks_of(root: nn.Module) -> Iterator[Stack | RefusedStack]:
    """Yield the stacks of decoder layers in `root`, which may be called: its linears are packed already."""
    models = pretrained_models()
    if not models:
        return
    found: dict[int, tuple[nn.Module, list[tuple[str, nn.Module]]]] = {}
    owners: dict[str, nn.Module] = {}
    for path, module in root.named_modules():
        if isinstance(module, models):
            owners[path] = module
        elif _cache_name(module) is not None and any(isinstance(m, PackedLinear) for m in module.modules()):
            above = [owner for owner in owners if not owner or path.startswith(f"{owner}.")]
            if above and path.rpartition(".")[2].isdigit():
                owner = owners[max(above, key=len)]
                found.setdefault(id(owner), (owner, []))[1].append((path, module))
    for owner, candidates in found.values():
        layers = _outermost(candidates)
        stack = attempt(layers[0][0], _run, owner, layers)
        if isinstance(stack, Refusal):
            yield RefusedStack(tuple(layers), stack)
        elif stack is not None:
            yield stack


def _cache_name(module: nn.Module) -> str | None:
    names = parameter_names(module.forward, keyword_only=True)
    if not names or names[0] != "hidden_states" or "attention_mask" not in names:
        return None
    return cache_argument(module.forward)


def _outermost(candidates: Sequence[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Return the outermost candidates: attention modules take the same arguments as the layers around them."""
    paths = [path for path, _ in candidates]
    return [
        (path, module)
        for path, module in candidates
        if not any(path.startswith(f"{other}.") for other in paths)
    ]


def _run(owner: Any, layers: list[tuple[str, nn.Module]]) -> Stack | Refusal | None:
    """Return the calls of a forward of a prompt, or None if the layers got no cache and are not decoder layers."""
    takes = parameters_of(owner.forward)
    crosses = ENCODER in takes and all(
        ENCODER in parameter_names(layer.forward, keyword_only=True) for _, layer in layers
    )
    # Decoders that support cross-attention, but are configured without it, reject encoder outputs.
    stack = _run_prompt(owner, layers, crosses=True) if crosses else None
    return stack if isinstance(stack, Stack) else _run_prompt(owner, layers, crosses=False)


def _run_prompt(owner: Any, layers: list[tuple[str, nn.Module]], *, crosses: bool) -> Stack | Refusal | None:
    width = next(m.in_features for m in layers[0][1].modules() if isinstance(m, PackedLinear))
    prompt = call_foreign(prompt_for, owner, width, crosses=crosses)
    if isinstance(prompt, Refusal):
        return prompt
    trace: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = []

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        trace.append((module, args, kwargs))

    last: list[Any] = []

    def keep_last(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        last[:] = [output[0] if isinstance(output, tuple) else output]

    shadow = Shadow(owner)
    for _, layer in layers:
        shadow.of(layer).register_forward_pre_hook(keep, with_kwargs=True)
    shadow.of(layers[-1][1]).register_forward_hook(keep_last)
    with torch.no_grad(), shadow.running():
        outputs = call_foreign(shadow.module, **prompt)
    if isinstance(outputs, Refusal):
        return Refusal(f"a call with a prompt and a cache failed: {outputs.reason}")
    if [id(shadow.original(module)) for module, _, _ in trace] != [id(layer) for _, layer in layers]:
        return Refusal(f"{type(owner).__name__} does not call its layers once each in order")
    calls = [_call(*call) for call in trace]
    made = tuple(call for call in calls if call is not None)
    values = (
        outputs.values()
        if isinstance(outputs, dict)
        else outputs
        if isinstance(outputs, tuple)
        else (outputs,)
    )
    returned = any(isinstance(value, Tensor) and _share(value, last[0]) for value in values)
    return Stack(owner, tuple(layers), made, returned) if len(made) == len(layers) else None


def _share(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _call(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerCall | None:
    first, *names = parameter_names(layer.forward, keyword_only=True)
    arguments = dict(zip((first, *names), args, strict=False)) | kwargs
    hidden_states = arguments.pop(first)
    cache = _cache_name(layer)
    if not args or not isinstance(hidden_states, Tensor) or cache is None or arguments.get(cache) is None:
        return None
    tables = [name for name, value in arguments.items() if _is_table_pair(value)]
    if len(tables) > 1:
        return None
    rotary = tables[0] if tables else None
    encoder = ENCODER if isinstance(arguments.get(ENCODER), Tensor) else None
    encoder_mask = None if encoder is None or ENCODER_MASK not in names else ENCODER_MASK
    shared = next((name for name, value in arguments.items() if _holds_heads(value)), None)
    return LayerCall(
        hidden_states, tuple(names), arguments, cache, "attention_mask", rotary, encoder, encoder_mask, shared
    )


def _holds_heads(value: Any) -> bool:
    """Return whether the value is a mapping to pairs of keys and values, as after calls of layers."""
    return (
        isinstance(value, MutableMapping)
        and len(value) > 0
        and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value.values())
        and all(isinstance(t, Tensor) and t.dim() == 4 for pair in value.values() for t in pair)
    )


def _is_table_pair(value: Any) -> bool:
    return (
        isinstance(value, tuple)
        and len(value) == 2
        and all(isinstance(t, Tensor) and t.is_floating_point() and t.dim() == 3 for t in value)
    )
