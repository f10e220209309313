"""Arguments of encoder layers, and the inputs that show their structure."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.hosts.arguments import parameter_names, parameters_of, takes_cache
from hf_cpu_accel.rewrite.encoder.call_form import ROTARY, SEQUENCES

_DECODES = "is_decoder"  # attribute of layers that are built to be an encoder's or a decoder's


def passed_names(layer: nn.Module) -> tuple[str, ...]:
    """Return the names of the parameters after hidden states, including those that `**kwargs` pass on to attention over packed
    sequences."""
    names = parameter_names(layer.forward)[1:]
    kinds = {p.kind for p in parameters_of(layer.forward).values()}
    if inspect.Parameter.VAR_KEYWORD not in kinds or SEQUENCES in names:
        return names
    inner = {name for child in layer.children() for name in parameter_names(child.forward)}
    more = (SEQUENCES, ROTARY) if SEQUENCES in inner else ()
    return (*names, *(name for name in more if name in inner and name not in names))


def may_decode(layer: nn.Module, names: tuple[str, ...]) -> bool:
    """Return whether the layer takes a cache by one of `names`, and is not marked as an encoder layer."""
    said = {vars(module).get(_DECODES) for module in layer.modules()} - {None}
    return takes_cache(names) and said != {False}


def padded(batch: int, length: int) -> Tensor:
    """Return a mask, bool [batch, 1, length, length], that hides the last token of the last sequence."""
    tokens = torch.ones(batch, length, dtype=torch.bool)
    tokens[-1, length - 1 :] = False
    return tokens[:, None, None].expand(batch, 1, length, length)


def rotary_tables(length: int, head_size: int, dtype: torch.dtype, *, turn: bool) -> tuple[Tensor, Tensor]:
    """Return (cos, sin) [1, length, head_size] as rotary modules do: for random positions, or without rotation."""
    angles = torch.rand(1, length, head_size // 2, generator=torch.Generator().manual_seed(6)) * 3
    angles = (angles if turn else torch.zeros_like(angles)).repeat(1, 1, 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def hidden_states_of(output: Any) -> Tensor:
    hidden_states: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden_states
