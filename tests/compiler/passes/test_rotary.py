"""The pass that finds rotary positions, in the spellings of transformers and diffusers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compiler.conftest import Calls, only_graph

pytestmark = pytest.mark.usefixtures("no_codegen")


def halves(x: Tensor) -> Tensor:
    low, high = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-high, low), dim=-1)


def neighbors(x: Tensor) -> Tensor:
    """As GPT-J and Cohere write it."""
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def unbound(x: Tensor) -> Tensor:
    """As Flux writes it."""
    real, imaginary = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    return torch.stack([-imaginary, real], dim=-1).flatten(3)


TURNS = [halves, neighbors, unbound]


def of_known_features(*tensors: Tensor) -> tuple[Tensor, ...]:
    """As where heads come from a projection."""
    for tensor in tensors:
        torch._dynamo.mark_static(tensor, tensor.dim() - 1)
    return tensors


def heads_first(turn: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda m, x, cos, sin: x * cos.unsqueeze(1) + turn(x) * sin.unsqueeze(1)


def heads_second(turn: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda m, x, cos, sin: x * cos[:, :, None] + turn(x) * sin[:, :, None]


def in_float32(turn: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda m, x, cos, sin: (x.float() * cos[:, :, None] + turn(x).float() * sin[:, :, None]).to(
        x.dtype
    )


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("spelling", [heads_first, heads_second])
def test_is_one_call(spelling: Any, batch: int, turn: Any, found: Any) -> None:
    shape = (2, 4, 7, 16) if spelling is heads_first else (2, 7, 4, 16)
    inputs = of_known_features(torch.randn(shape), torch.randn(batch, 7, 16), torch.randn(batch, 7, 16))
    assert found(Calls(spelling(turn)), *inputs) == {"rotary_embedding": 1}
    assert only_graph().rewrites["rotary"] == 1
    assert set(only_graph().rest) <= {"aten.transpose.int", "aten.unsqueeze.default", "aten.squeeze.dim"}


@pytest.mark.parametrize("turn", TURNS)
def test_a_conversion_to_float32_and_back_goes_along(turn: Any, compiled: Any) -> None:
    module = Calls(in_float32(turn))
    x, *tables = of_known_features(
        torch.randn(2, 7, 4, 16).bfloat16(), torch.randn(1, 7, 16), torch.randn(1, 7, 16)
    )
    with torch.no_grad():
        torch.testing.assert_close(compiled(module)(x, *tables), module(x, *tables), atol=0.05, rtol=0.01)
    assert only_graph().rewrites["rotary"] == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x, c, s: x * c[:, None] + torch.cat((-x[..., :8], x[..., 8:]), dim=-1) * s[:, None],
        lambda m, x, c, s: x * c[:, None] + torch.cat((-x[..., 8:], -x[..., :8]), dim=-1) * s[:, None],
        lambda m, x, c, s: x * c[:, None] + torch.cat((-x[..., 4:], x[..., :4]), dim=-1) * s[:, None],
        lambda m, x, c, s: (
            x * c[:, None] + torch.cat((-c[:, None, :, 8:], x[:1, :1, :, :8]), -1) * s[:, None]
        ),
        lambda m, x, c, s: x * c[:, None] - halves(x) * s[:, None],
        lambda m, x, c, s: x * c[0, 0] + halves(x) * s[0, 0],  # the same for all positions
    ],
)
def test_what_is_no_rotation_stays(function: Callable[..., Tensor], found: Any) -> None:
    inputs = of_known_features(torch.randn(1, 1, 7, 16), torch.randn(1, 7, 16), torch.randn(1, 7, 16))
    assert found(Calls(function), *inputs) == {}
