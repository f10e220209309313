"""The message of a layer, read by tracing its `message`: the features of the source node, optionally times a weight."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.runtime.torch_modes import AroundOps

_EDGES, _HEADS, _FEATURES = 3, 2, 4
_RESHAPES = (torch.ops.aten.view.default, torch.ops.aten.unsqueeze.default)


@dataclass(frozen=True)
class Message:
    """message(x_j, weight) = x_j, times the weight per edge (and head) if there is one.

    Attributes:
        features: the argument of `propagate` whose rows of the source nodes are the message.
        weight: the argument that multiplies the features, or None.
        copies: whether the message is x_j itself if the weight is None.
        heads: whether features are [nodes, heads, features of a head] and weights [edges, heads].
    """

    features: str
    weight: str | None
    copies: bool
    heads: bool


# An op that was called, its arguments, and its output.
OpCall = tuple[Any, tuple[Any, ...], Any]


def read_message(conv: nn.Module, names: list[str]) -> Message | None:
    """Return the `Message` that `conv.message` computes from arguments of these names; None if it computes anything else.

    The function is traced, because values do not show a factor that happens to be 1. It must compute the same in training and eval
    mode.
    """
    sources = [name for name in names if name.endswith("_j")]
    others = [name for name in names if name not in sources]
    if len(sources) != 1 or len(others) > 1 or any(name.endswith("_i") for name in others):
        return None
    with torch.random.fork_rng(devices=[]):  # in training, messages may draw numbers too
        readings = [_read_in_mode(conv, mode, sources[0], others) for mode in (False, True)]
    return readings[0] if readings[0] == readings[1] else None


def _read_in_mode(conv: nn.Module, training: bool, source: str, others: list[str]) -> Message | None:
    # A copy that shares the weights, since other threads may call the layer.
    shared = {id(tensor): tensor for tensor in (*conv.parameters(), *conv.buffers())}
    return _read(copy.deepcopy(conv, shared).train(training), source, others)


def _read(conv: nn.Module, source: str, others: list[str]) -> Message | None:
    message: Callable[..., Any] = conv.message  # type: ignore[assignment]
    plain, by_head = torch.randn(_EDGES, _FEATURES), torch.randn(_EDGES, _HEADS, _FEATURES)
    copies = _is_copy(message, {source: plain, **dict.fromkeys(others)}, plain)
    if not others:
        return Message(source[:-2], None, True, False) if copies else None
    if _is_product(message, plain, source, torch.randn(_EDGES), others[0]):
        return Message(source[:-2], others[0], copies, False)
    if _is_product(message, by_head, source, torch.randn(_EDGES, _HEADS), others[0]):
        return Message(source[:-2], others[0], False, True)
    return None


def watch(message: Callable[..., Any], arguments: dict[str, Any]) -> tuple[Any, list[OpCall]] | None:
    """Return the output of a method of a layer and the ops that it calls; None if it raises an exception."""
    calls: list[OpCall] = []

    def note(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = op(*args, **kwargs)
        calls.append((op, args, output))
        return output

    try:
        with torch.no_grad(), AroundOps(note):
            return message(**arguments), calls
    except Exception:  # unknown code may raise anything; then it is not a supported message
        return None


def _is_copy(message: Callable[..., Any], arguments: dict[str, Any], features: Tensor) -> bool:
    seen = watch(message, arguments)
    return seen is not None and seen[0] is features and not seen[1]


def _is_product(
    message: Callable[..., Any], features: Tensor, source: str, weight: Tensor, name: str
) -> bool:
    """Return whether `message` is exactly one multiplication, of the features with the weight in another shape."""
    seen = watch(message, {source: features, name: weight})
    if seen is None or not seen[1]:
        return False
    output, (*reshapes, product) = seen
    if any(function not in _RESHAPES for function, _, _ in reshapes):
        return False
    function, factors, result = product
    if function is not torch.ops.aten.mul.Tensor or result is not output:
        return False
    first, second = factors[:2]
    scale = second if first is features else first if second is features else None
    if not isinstance(scale, Tensor) or scale.data_ptr() != weight.data_ptr():
        return False
    return scale.shape == (*weight.shape, 1) and output.shape == features.shape
