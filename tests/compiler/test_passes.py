"""Single passes on graphs of a few nodes: every spelling they know, and what they must leave alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.compiler.activations import ACTIVATIONS
from tests.compiler.conftest import Calls, only_graph

pytestmark = pytest.mark.usefixtures("no_codegen")


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


LINEARS: list[Callable[[Any, Tensor], Tensor]] = [
    lambda m, x: F.linear(x, m.w),
    lambda m, x: F.linear(x, m.w, m.b),
    lambda m, x: x @ m.w.t(),
    lambda m, x: torch.matmul(x, m.w.T),
    lambda m, x: x @ m.w.transpose(0, 1),
    lambda m, x: torch.addmm(m.b, x.view(-1, 32), m.k).view(*x.shape[:2], 48),
    lambda m, x: torch.mm(x.view(-1, 32), m.k),
    lambda m, x: x @ m.k,
]


@pytest.mark.parametrize("function", LINEARS)
def test_spellings_of_a_linear_layer(function: Callable[..., Tensor], found: Any) -> None:
    module = Calls(function, w=weight(48, 32), k=weight(32, 48), b=weight(48))
    assert found(module, torch.randn(3, 5, 32)) == {"linear": 1}


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: F.linear(x, m.w * x.sum()),  # not a parameter
        lambda m, x: F.linear(x, m.small),  # few output features
        lambda m, x: F.linear(x.double(), m.wide),
        lambda m, x: m.w @ x.transpose(1, 2),  # the weight in front
    ],
)
def test_products_that_are_no_linear_layers(function: Callable[..., Tensor], found: Any) -> None:
    module = Calls(
        function, w=weight(48, 32), small=weight(8, 32), wide=nn.Parameter(torch.randn(48, 32).double())
    )
    assert found(module, torch.randn(3, 5, 32)) == {}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_go_into_the_product(activation: Callable[[Tensor], Tensor], found: Any) -> None:
    module = Calls(lambda m, x: activation(m.up(x)), up=nn.Linear(32, 64))
    assert found(module, torch.randn(3, 5, 32)) == {"linear": 1}
    assert set(only_graph().rest) <= {"aten.view.default"}


def test_an_ffn_with_its_residual_is_one_call(found: Any) -> None:
    module = Calls(lambda m, x: x + m.down(F.gelu(m.up(x))), up=nn.Linear(32, 64), down=nn.Linear(64, 32))
    assert found(module, torch.randn(3, 5, 32)) == {"ffn": 1}
    assert only_graph().rest == {}


def test_values_that_others_need_stay(found: Any) -> None:
    def both(m: Any, x: Tensor) -> Tensor:
        y = m.up(x)
        return F.relu(y) + y.sum()

    assert found(Calls(both, up=nn.Linear(32, 64)), torch.randn(3, 5, 32)) == {"linear": 1}
    assert only_graph().rewrites["activation"] == 0


def test_a_residual_that_is_broadcast_stays(found: Any) -> None:
    module = Calls(lambda m, x: m.up(x) + m.b, up=nn.Linear(32, 64), b=weight(64))
    found(module, torch.randn(3, 5, 32))
    assert only_graph().rewrites["residual"] == 0


def test_a_residual_that_is_written_to_stays(found: Any) -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        y = x * 1.5
        product = m.up(x)
        y.add_(1)
        return product + y

    assert found(Calls(function, up=nn.Linear(32, 32)), torch.randn(3, 5, 32)) == {"linear": 1}
    assert only_graph().rewrites["residual"] == 0


def test_linears_on_one_input_are_one_product(found: Any) -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        return m.q(x) * m.k(x) + m.v(x)

    q, k, v = nn.Linear(32, 64), nn.Linear(32, 64, bias=False), nn.Linear(32, 64)
    assert found(Calls(function, q=q, k=k, v=v), torch.randn(3, 5, 32)) == {"linear_split": 1}


def test_linears_that_do_not_end_with_a_panel_stay_apart(found: Any) -> None:
    module = Calls(lambda m, x: m.q(x) * m.k(x), q=nn.Linear(32, 40), k=nn.Linear(32, 40))
    assert found(module, torch.randn(3, 5, 32)) == {"linear": 2}


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


def heads(x: Tensor) -> Tensor:
    """[B, L, 64] -> [B, 4, L, 16]. Inside of the model, so that the number of heads is no symbol."""
    return x.unflatten(-1, (4, 16)).transpose(1, 2)


def with_heads(function: Callable[..., Tensor]) -> Calls:
    return Calls(lambda m, q, k, v, *rest: function(m, heads(q), heads(k), heads(v), *rest))


def softmax_of(scores: Tensor) -> Tensor:
    return F.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype)


HANDWRITTEN: list[Callable[..., Tensor]] = [
    lambda m, q, k, v, b: torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(16), -1) @ v,
    lambda m, q, k, v, b: torch.matmul(softmax_of(torch.matmul(q, k.transpose(2, 3)) * 0.3 + b), v),
    lambda m, q, k, v, b: torch.matmul(F.softmax((q * 0.5) @ (k * 0.25).transpose(-2, -1) + b, dim=-1), v),
    lambda m, q, k, v, b: F.scaled_dot_product_attention(q, k, v, b),
    lambda m, q, k, v, b: F.scaled_dot_product_attention(q, k, v, scale=0.7),
]


@pytest.mark.parametrize("function", HANDWRITTEN)
def test_spellings_of_attention(function: Callable[..., Tensor], found: Any) -> None:
    bias = torch.randn(2, 1, 5, 7)
    query, key, value = (torch.randn(2, length, 64) for length in (5, 7, 7))
    assert found(with_heads(function), query, key, value, bias) == {"attention": 1}


@pytest.mark.parametrize(
    "function",
    [
        lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),  # from the first key on
        lambda m, q, k, v: torch.softmax(q @ k.transpose(-1, -2), -2) @ v,  # over the queries
    ],
)
def test_what_only_looks_like_our_attention_stays(function: Callable[..., Tensor], found: Any) -> None:
    query, key, value = (torch.randn(2, length, 64) for length in (5, 7, 7))
    assert found(with_heads(function), query, key, value) == {}


def test_causal_attention_over_all_keys(found: Any) -> None:
    module = with_heads(lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    assert found(module, *torch.randn(3, 2, 5, 64)) == {"attention": 1}


def masked(rule: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Attention under a mask that is computed the way transformers does."""

    def function(m: Any, x: Tensor, padding: Tensor) -> Tensor:
        q, k, v = (heads(part) for part in x.chunk(3, dim=-1))
        batch, _, length, _ = q.shape
        positions = torch.arange(length)
        rows, queries, keys = (
            torch.arange(batch)[:, None, None, None],
            positions[None, None, :, None],
            positions[None, None, None],
        )
        mask = (rule(queries, keys) & padding.bool()[rows, keys]).expand(batch, -1, length, length)
        return F.scaled_dot_product_attention(q, k, v, mask)

    return function


@pytest.mark.parametrize(
    ("rule", "is_read"),
    [
        (lambda queries, keys: keys <= queries, True),
        (lambda queries, keys: queries >= 0, True),
        (lambda queries, keys: keys < queries + 3, False),
        (lambda queries, keys: queries <= keys, False),
        (lambda queries, keys: (keys <= queries) & (keys > queries - 3), False),
    ],
)
def test_masks_are_not_made_where_they_say_causality_and_padding(
    rule: Any, is_read: bool, found: Any
) -> None:
    padding = torch.ones(2, 6, dtype=torch.int64)
    padding[1, 5:] = 0
    module = Calls(masked(rule))
    assert found(module, torch.randn(2, 6, 192), padding) == {"attention": 1}
    assert ("aten.index.Tensor" not in only_graph().rest) == is_read


def test_dropout_in_training_is_not_lost(compiled: Callable[..., Any]) -> None:
    module = Calls(lambda m, x: F.dropout(m.up(x), 0.5, True), up=nn.Linear(32, 64))
    with torch.no_grad():
        output = compiled(module)(torch.randn(3, 5, 32))
    assert (output == 0).float().mean() > 0.2


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
