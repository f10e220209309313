"""What is computed from parameters alone is computed ahead of the calls, and again when they change."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from hf_cpu_accel.compiler.weight_transforms import (
    Composed,
    Computed,
    FoldedNorm,
    PackedConvolution,
    Part,
    Value,
)
from tests.compiler.conftest import Calls, only_graph

pytestmark = pytest.mark.usefixtures("no_codegen")


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: F.linear(x, m.w * 2 + 1),
        lambda m, x: x @ (m.w.exp() / 3).t(),
        lambda m, x: F.linear(x, torch.cat([m.w[:16], m.w[:32] * m.row], dim=0)),
    ],
)
def test_a_computed_weight_is_packed(function: Callable[..., Tensor], found: Any) -> None:
    module = Calls(function, w=weight(48, 32), row=weight(32))
    assert found(module, torch.randn(3, 5, 32)) == {"linear": 1}
    assert only_graph().rewrites["constants"] == 1
    assert only_graph().rest == {}


def test_a_weight_of_direction_and_length_is_packed(found: Any) -> None:
    module = parametrizations.weight_norm(nn.Linear(32, 48))
    assert found(module, torch.randn(3, 5, 32)) == {"linear": 1}
    assert only_graph().rest == {}


def test_a_norm_whose_weight_is_computed(found: Any) -> None:
    module = Calls(
        lambda m, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (2 + m.w), w=weight(32)
    )
    assert found(module, torch.randn(3, 5, 32)) == {"rms_norm": 1}
    assert only_graph().rest == {}


def test_a_bias_gathered_from_a_table_is_gathered_once(found: Any) -> None:
    """As Swin and BEiT do for each layer; the view that gives it a batch stays."""
    module = Calls(
        lambda m, x: x + m.table[m.index.view(-1)].view(6, 6, 4).permute(2, 0, 1).contiguous().unsqueeze(0),
        table=weight(11, 4),
    )
    module.register_buffer("index", torch.randint(0, 11, (6, 6)))
    found(module, torch.randn(3, 4, 6, 6))
    assert only_graph().rewrites["constants"] == 1
    assert set(only_graph().rest) == {"aten.unsqueeze.default", "aten.add.Tensor"}


def test_a_parameter_that_changes_is_computed_with_anew(compiled: Callable[..., Any]) -> None:
    module = Calls(lambda m, x: F.linear(x, m.w * m.row), w=weight(48, 32), row=weight(32))
    fast, x = compiled(module), torch.randn(5, 32)
    for change in (lambda: None, lambda: module.row.add_(1.0), lambda: module.w.mul_(2.0)):
        with torch.no_grad():
            change()
            torch.testing.assert_close(fast(x), module(x), atol=1e-5, rtol=1e-4)
    assert only_graph().rewrites["constants"] == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: (x, m.w * 2),  # whoever gets it may write to it
        lambda m, x: (x, (m.w * 2)[0].unsqueeze(0)),
        lambda m, x: x + m.w.expand(3, 8).unsqueeze(0),  # views alone cost nothing
        lambda m, x: x + torch.rand_like(m.w) * 0,  # by chance, another in each call
        lambda m, x: x + (m.w * x.shape[0]),  # another for each batch
    ],
)
def test_what_must_be_computed_in_each_call_stays(
    function: Callable[..., Any], compiled: Callable[..., Any]
) -> None:
    module, x = Calls(function, w=weight(1, 8)), torch.randn(2, 3, 8)
    with torch.no_grad():
        torch.testing.assert_close(compiled(module)(x), module(x))
    assert only_graph().rewrites["constants"] == 0


@pytest.mark.parametrize(
    ("function", "count"),
    [
        (lambda m, x: x + m.w[:, None] * m.w[None], 0),
        (lambda m, x: x + (m.w[:, None] * m.w[None]).sum(), 1),  # what it is a sum of is forgotten
    ],
)
def test_what_would_take_far_more_memory_stays(
    function: Callable[..., Tensor], count: int, found: Any
) -> None:
    found(Calls(function, w=weight(3000)), torch.randn(1, 1))
    assert only_graph().rewrites["constants"] == count


def test_recipes_are_composed() -> None:
    """A folded and packed convolution: the folded weight is made on the way and forgotten."""
    fold = Part(FoldedNorm(1e-5, (False, False, False)), (0,))
    recipe = Composed(PackedConvolution("float32", tiled=False), ((fold, 3),))
    kernel, mean, variance = torch.randn(32, 16, 3, 3), torch.randn(32), torch.rand(32) + 0.5
    (packed,) = recipe.make(kernel, mean, variance)
    (expected,) = PackedConvolution("float32", tiled=False).make(*fold.make(kernel, mean, variance))
    assert torch.equal(packed, expected)
    assert recipe.shapes(kernel, mean, variance) == [(tuple(packed.shape), packed.dtype)]


def test_recipes_travel_to_other_processes() -> None:
    recipe = Computed((("aten.mul.Tensor", (Value(0), Value(1)), ()),), (3,), torch.float32)
    again = pickle.loads(pickle.dumps(recipe))
    assert again == recipe
    assert hash(again) == hash(recipe)
    assert torch.equal(again.make(torch.ones(3), torch.full((3,), 2.0))[0], torch.full((3,), 2.0))
