"""Norms on graphs of a few nodes: every spelling, what is fused into them, and what must be left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_a_sum_and_its_norm_are_one_call(norm: type[nn.Module], found: Any) -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        total = m.first(x) + m.second(x)
        return total * m.third(total)

    norms = {name: norm(32, eps=1e-6) for name in ("first", "second", "third")}
    name = "layer_norm" if norm is nn.LayerNorm else "rms_norm"
    assert found(Calls(function, **norms), torch.randn(3, 5, 32)) == {name: 2, f"add_{name}": 1}
    assert only_graph().rest == {"<built-in function getitem>": 2, "aten.mul.Tensor": 1}


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x, y: m.norm(m.first(x) + m.first(y)),  # nobody else needs the sum
        lambda m, x, y: (
            (x * 2 + y * 3).add(1).mul(m.norm(x * 2 + y * 3))
        ),  # Inductor adds while it multiplies
        lambda m, x, y: (s := m.first(x) + m.first(y)[:1]) * m.norm(s),  # broadcast
    ],
)
def test_sums_that_are_not_norms_alone_stay(function: Callable[..., Tensor], found: Any) -> None:
    module = Calls(function, first=nn.LayerNorm(32), norm=nn.LayerNorm(32))
    assert "add_layer_norm" not in found(module, torch.randn(3, 5, 32), torch.randn(3, 5, 32))


@pytest.mark.parametrize("shape", [(2, 8, 5, 6), (2, 8, 7), (3, 8)])
def test_silu_goes_into_a_group_norm(shape: tuple[int, ...], found: Any) -> None:
    module = Calls(lambda m, x: F.silu(m.norm(x)), norm=nn.GroupNorm(4, 8))
    assert found(module, torch.randn(shape)) == {"group_norm": 1}
    assert only_graph().rewrites["group_norm"] == 2
    assert only_graph().rest == {}


def test_a_group_norm_that_others_read_keeps_its_silu_apart(found: Any) -> None:
    def both(m: Any, x: Tensor) -> Tensor:
        y = m.norm(x)
        return F.silu(y) + y

    module = Calls(both, norm=nn.GroupNorm(4, 8))
    assert found(module, torch.randn(2, 8, 5)) == {"group_norm": 1}
    assert only_graph().rest["aten.silu.default"] == 1


def test_group_norms_in_other_dtypes_stay(found: Any) -> None:
    module = Calls(lambda m, x: m.norm(x.double()).float(), norm=nn.GroupNorm(4, 8).double())
    assert found(module, torch.randn(2, 8, 5)) == {}
