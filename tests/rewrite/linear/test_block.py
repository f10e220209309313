"""Containers around one linear: which ones the rule matches and rejects, and their outputs."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from hf_cpu_accel import accelerate_for_cpu
from tests.rewrite.containers import BINARY, UNARY, Binary, Optional, R, Unary, Wrapped, X, agrees


@pytest.mark.parametrize(
    ("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 0.02), ("int8", 0.05), ("int4", 0.2)]
)
@pytest.mark.parametrize("structure", UNARY)
def test_unary_blocks(structure, dtype, bound):
    assert agrees(Unary(**UNARY[structure]), X, dtype=dtype, bound=bound) == {structure: 1}


@pytest.mark.parametrize(
    ("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 0.02), ("int8", 0.05), ("int4", 0.2)]
)
@pytest.mark.parametrize("structure", BINARY)
def test_binary_blocks(structure, dtype, bound):
    assert agrees(Binary(**BINARY[structure]), X, R, dtype=dtype, bound=bound) == {structure: 1}


def test_inputs_by_name():
    model = Wrapped(Binary(**BINARY["linear + residual + norm"])).eval()
    with torch.no_grad():
        expected = model(X, R)
        accelerate_for_cpu(model, dtype="float32")
        for output in (model(X, input_tensor=R), model(input_tensor=R, hidden_states=X)):
            torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
        with pytest.raises(KeyError):
            model(X, residual=R)


def test_activation_held_as_a_function():
    part = Unary(lambda m, x: m.function(m.dense(x)))
    part.function = functional.silu
    assert agrees(part, X) == {"linear + activation": 1}


@pytest.mark.parametrize(
    "part",
    [
        Unary(lambda m, x: 2 * m.act(m.dense(x)), activation=nn.GELU()),
        Unary(lambda m, x: m.dense(m.act(x)), activation=nn.GELU()),
        Unary(lambda m, x: m.act(m.dense(x))[:, 1], activation=nn.GELU()),
        Unary(lambda m, x: m.act(m.dense(x)), activation=nn.PReLU()),
        Binary(lambda m, x, r: m.norm(m.dense(x)) + r, norm=nn.LayerNorm(64)),
        Binary(lambda m, x, r: m.dense(x), norm=None),
        Optional(lambda m, x: m.act(m.dense(x)), activation=nn.GELU()),
    ],
    ids=["scaled", "before", "second token", "prelu", "post-norm", "residual ignored", "optional input"],
)
def test_what_only_looks_like_a_block_keeps_its_forward(part):
    inputs = (X, R) if isinstance(part, Binary) else (X,)
    assert agrees(part, *inputs) == {"linear": 1}


def test_a_block_with_weights_of_its_own_is_not_one():
    part = Unary(lambda m, x: m.act(m.dense(x)) + m.extra, activation=nn.GELU())
    part.extra = nn.Parameter(torch.zeros(64))
    assert agrees(part, X) == {"linear": 1}
