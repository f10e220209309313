"""Norms on graphs of a few nodes: every spelling, what is fused into them, and what must be left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.compiler.conftest import Calls, only_graph, weight

pytestmark = pytest.mark.usefixtures("no_codegen")


def rms(x: Tensor, w: Tensor, power: Callable[[Tensor], Tensor]) -> Tensor:
    y = x.float()
    return w * (y * torch.rsqrt(power(y).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: rms(x, m.w, lambda y: y.pow(2)),
        lambda m, x: rms(x, m.w, lambda y: y * y),
        lambda m, x: rms(x, m.w, torch.square),
        lambda m, x: F.rms_norm(x, (32,), m.w, 1e-6),
    ],
)
def test_spellings_of_an_rms_norm(function: Callable[..., Tensor], found: Any) -> None:
    assert found(Calls(function, w=weight(32)), torch.randn(3, 5, 32)) == {"rms_norm": 1}


@pytest.mark.parametrize("options", [{}, {"eps": 1e-3}])
def test_a_layer_norm_is_one_call(options: dict[str, float], found: Any) -> None:
    module = Calls(lambda m, x: F.layer_norm(x, (32,), m.w, m.b, **options), w=weight(32), b=weight(32))
    assert found(module, torch.randn(3, 5, 32)) == {"layer_norm": 1}


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: rms(x, m.w, lambda y: y.pow(2)[:, :1]),  # the mean of another tensor
        lambda m, x: m.w * (x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6)),  # over another dimension
        lambda m, x: m.w * (x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + 1e-6)),
    ],
)
def test_what_only_looks_like_an_rms_norm_stays(function: Callable[..., Tensor], found: Any) -> None:
    assert found(Calls(function, w=weight(32)), torch.randn(3, 5, 32)) == {}


def rms_of_gemma(x: Tensor, w: Tensor) -> Tensor:
    """As transformers writes it: the weight is what differs from 1."""
    y = x.float()
    normed = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (normed * (1.0 + w.float())).type_as(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_rms_norm_whose_weight_is_added_to_one(dtype: torch.dtype, compiled: Callable[..., Any]) -> None:
    module = Calls(lambda m, x: rms_of_gemma(x, m.w), w=weight(32)).to(dtype)
    x = torch.randn(3, 5, 32, dtype=dtype)
    fast = compiled(module)
    for _ in range(2):
        with torch.no_grad():
            got, expected = fast(x), module(x)
            assert got.dtype is dtype
            torch.testing.assert_close(
                got, expected, atol=1e-5, rtol=1e-5 if dtype is torch.float32 else 1e-2
            )
            module.w.mul_(2)
    assert only_graph().ours == {"hf_cpu_accel.rms_norm.default": 1}
