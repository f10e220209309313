"""Trace one forward of a decoder layer on inputs that show its structure."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.rewrite.core.foreign_code import call_foreign
from hf_cpu_accel.rewrite.core.refusal import required
from hf_cpu_accel.rewrite.decoder.calls import LayerCall
from hf_cpu_accel.rewrite.decoder.rotary import sines_first
from hf_cpu_accel.rewrite.decoder.trace import DecoderTrace
from hf_cpu_accel.rewrite.decoder.watch import record_calls, recording_cache, recording_mapping
from hf_cpu_accel.rewrite.experts.layer import PackedExperts

_BATCH, _TOKENS, _ROUTED_TOKENS = 2, 4, 32


def record(layer: nn.Module, call: LayerCall, past: int = 0) -> DecoderTrace:
    """Trace a forward of `layer`, a randomized copy, on random hidden states and with the other arguments of `call`.

    With experts it uses more tokens: different routing rules may send a few tokens to the same experts.

    Args:
        past: how many tokens the cache pretends to hold.

    Raises:
        Refused: the layer's code raises an error.
    """
    features = call.hidden_states.shape[-1]
    generator = torch.Generator().manual_seed(0)
    tokens = _ROUTED_TOKENS if any(isinstance(m, PackedExperts) for m in layer.modules()) else _TOKENS
    trace = DecoderTrace(torch.randn(_BATCH, tokens, features, generator=generator), None)
    arguments = {name: _unrotated(value, tokens) for name, value in call.arguments.items()}
    if call.encoder is not None:
        given = call.arguments[call.encoder]
        trace.encoder = torch.randn(_BATCH, *given.shape[1:], generator=generator)
        arguments[call.encoder] = trace.encoder
    for name, value in call.arguments.items():
        if name != call.encoder and _is_of_tokens(value, call.hidden_states):
            trace.inputs[name] = torch.randn(_BATCH, tokens, value.shape[2], generator=generator)
    arguments |= trace.inputs
    if call.shared is not None:
        arguments[call.shared] = recording_mapping(trace, call.arguments[call.shared])
    if call.encoder_mask is not None:
        arguments[call.encoder_mask] = None
    arguments |= {call.mask: None, call.cache: recording_cache(trace, past)}
    with torch.no_grad(), record_calls(layer, trace):
        output = required(call_foreign(layer, trace.input, **arguments))
    trace.output, *rest = output if isinstance(output, tuple) else (output,)
    trace.rest = tuple(rest) if isinstance(output, tuple) else None
    return trace


def _is_of_tokens(value: Any, hidden_states: Tensor) -> bool:
    """Return whether the value has values for each token of a call, as hidden states do."""
    is_floating = isinstance(value, Tensor) and value.is_floating_point()
    return is_floating and value.dim() == 3 and value.shape[:2] == hidden_states.shape[:2]


def _unrotated(value: Any, tokens: int) -> Any:
    """Return rotary tables of positions without rotation; other tensors in float32."""
    if isinstance(value, tuple) and all(isinstance(part, Tensor) for part in value) and len(value) == 2:
        first, second = (part[:1, :1].float().expand(1, tokens, -1) for part in value)
        cos, sin = torch.ones_like(first), torch.zeros_like(second)
        return (sin, cos) if sines_first(value) else (cos, sin)
    if isinstance(value, Tensor) and value.dim() == 2 and not value.is_floating_point():
        return torch.zeros(_BATCH, tokens, dtype=value.dtype)
    if isinstance(value, Tensor) and value.dim() == 3 and value.is_floating_point():
        return value.float()
    return value
