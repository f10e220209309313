"""Compare a fused mixer with a cache with its class's own forward: for a prompt, a step, and the contents of the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hf_cpu_accel.check import compare
from hf_cpu_accel.guard.modules import class_of
from hf_cpu_accel.hosts.arguments import parameters_of, with_its_cache_name
from hf_cpu_accel.rewrite.core.foreign_code import call_foreign
from hf_cpu_accel.rewrite.core.refusal import Refusal
from hf_cpu_accel.rewrite.core.shadow_copy import Shadow
from hf_cpu_accel.rewrite.linear.layer import PackedLinear
from hf_cpu_accel.rewrite.mixer.mixer import Example, FusedMixer
from hf_cpu_accel.tolerance import DECODER_LAYER

_BATCH, _TOKENS, _PADDING = 2, 9, 3
_LARGE = 1000.0

M = TypeVar("M", bound=FusedMixer)


def first_verified(module: nn.Module, possible: Iterable[Callable[[nn.Module], M]]) -> M | Refusal:
    """Return the first mixer from `possible` that agrees with `module`, or a refusal."""
    refusal = None
    for make in possible:
        mixer = make(module)
        expected = _outputs(module, mixer.example(_BATCH, _TOKENS, _PADDING))
        if isinstance(expected, Refusal):
            refusal = refusal or expected
            continue
        shadow = Shadow(module)
        try:
            with torch.no_grad(), shadow.running():
                outputs = _run(make(shadow.module), mixer.example(_BATCH, _TOKENS, _PADDING))
        except (RuntimeError, ValueError):  # its parts are of other sizes
            continue
        if compare(outputs, expected).within(DECODER_LAYER):
            return mixer
    return refusal or Refusal("the fused attention computes a different result: its parts run separately")


def _packed_parts(module: nn.Module) -> Iterator[PackedLinear]:
    return (part for part in module.modules() if isinstance(part, PackedLinear))


def _outputs(module: nn.Module, example: Example) -> tuple[Tensor, ...] | Refusal:
    shadow = Shadow(module)
    with torch.no_grad(), shadow.running():
        outputs: tuple[Tensor, ...] | Refusal = call_foreign(_run, shadow.module, example)
    return outputs


def _run(module: Any, example: Example) -> tuple[Tensor, ...]:
    """Return the outputs for the prompt, for the token after it and for a prompt alone, and the contents of the cache."""
    linear = next(_packed_parts(module))
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(_BATCH, _TOKENS + 1, linear.in_features, generator=generator).to(linear.weight_dtype)

    def run(x: Tensor, **named: Any) -> Tensor:
        return _attended(module(x, **with_its_cache_name(names, named)))

    own: Any = class_of(module)
    names = parameters_of(own.forward)
    prompt = run(states[:, :_TOKENS], **example.prompt)
    token = run(states[:, _TOKENS:], **example.token)
    alone = run(states[:, :_TOKENS], **{**example.prompt, "cache": None, "attention_mask": None})
    cache = example.token["cache"]
    held = _cached_keys_and_values(cache, module.layer_idx)
    cache.layers[module.layer_idx].reset()
    # Only large values show a clamp of projections.
    large = run(_LARGE * states[:, _TOKENS:], **{**example.token, "attention_mask": None})
    return (
        prompt[example.tokens],
        token,
        alone,
        large,
        *held,
        *_cached_keys_and_values(cache, module.layer_idx),
    )


def _attended(output: Any) -> Tensor:
    """Return the hidden states.

    Raises:
        TypeError: the output is not (hidden states, None).
    """
    if not isinstance(output, tuple) or len(output) != 2 or output[1] is not None:
        raise TypeError("it returns more than hidden states")
    attended: Tensor = output[0]
    return attended


def _cached_keys_and_values(cache: Any, index: int) -> tuple[Tensor, Tensor]:
    layer = cache.layers[index]
    return layer.keys.flatten(0, 2).clone(), layer.values.flatten(0, 2).clone()
