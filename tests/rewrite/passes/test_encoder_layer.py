"""Encoder layers matched from their captured programs: the same layers as by the matchers of traces, and equal values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.rewrite.encoder.fuse import PASSES
from tests.rewrite.encoder_families import FUSED, inputs, run

_HIDDEN = 64


@pytest.fixture(autouse=True)
def _by_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PASSES, "1")


def _layers(model: nn.Module) -> list[tuple[str, str | None]]:
    return [(item.name, item.reason) for item in explain(model).items if item.structure == "encoder layer"]


@pytest.mark.parametrize("name", FUSED)
def test_layers_are_fused_and_give_the_same(name: str) -> None:
    build, count = FUSED[name]
    model = build()
    batch = inputs(model)
    before = run(model, batch)
    accelerate_for_cpu(model, dtype="float32")
    assert sum(reason is None for _, reason in _layers(model)) == count
    torch.testing.assert_close(run(model, batch), before, rtol=1e-4, atol=1e-5)
    restore(model)
    assert torch.equal(run(model, batch), before)


class _Layer(nn.Module):
    """A pre-norm layer, with one difference by name."""

    def __init__(self, difference: str = "") -> None:
        super().__init__()
        self.difference = difference
        self.norm1, self.norm2 = nn.LayerNorm(_HIDDEN), nn.LayerNorm(_HIDDEN)
        self.qkv = nn.Linear(_HIDDEN, 3 * _HIDDEN)
        self.query, self.key, self.value = (nn.Linear(_HIDDEN, _HIDDEN) for _ in range(3))
        self.output = nn.Linear(_HIDDEN, _HIDDEN)
        self.up, self.down = nn.Linear(_HIDDEN, 96), nn.Linear(96, _HIDDEN)
        if difference in ("one wide linear", "heads of values reversed"):
            del self.query, self.key, self.value
        else:
            del self.qkv

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = self.norm1(hidden_states)
        if hasattr(self, "qkv"):
            query, key, value = self.qkv(x).chunk(3, dim=-1)
        else:
            query, key, value = self.query(x), self.key(x), self.value(x)
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in (query, key, value))
        if self.difference == "heads of values reversed":
            v = v.flip(1)
        if self.difference == "scores are capped":
            scores = 5 * torch.tanh(q @ k.mT / 20)
            attended = scores.softmax(dim=-1) @ v
        elif self.difference == "scale in the query":
            attended = (q * 0.3 @ k.mT).softmax(dim=-1) @ v
        else:
            attended = functional.scaled_dot_product_attention(q, k, v)
        attended = self.output(attended.transpose(1, 2).flatten(2))
        hidden_states = (x if self.difference == "residual of the norm" else hidden_states) + attended
        up = functional.gelu(self.up(self.norm2(hidden_states)))
        if self.difference == "branch of the input":
            return x + self.down(up)
        return hidden_states + self.down(up)


class _Stack(nn.Module):
    def __init__(self, difference: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Layer(difference), _Layer(difference)])

    def forward(self, hidden_states: Tensor) -> Tensor:
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return hidden_states


@pytest.mark.parametrize("difference", ["", "one wide linear", "scale in the query"])
def test_what_the_op_computes_is_matched(difference: str) -> None:
    torch.manual_seed(0)
    model, states = _Stack(difference).eval(), torch.randn(2, 7, _HIDDEN)
    with torch.no_grad():
        before = model(states)
        accelerate_for_cpu(model, dtype="float32")
        assert [reason for _, reason in _layers(model)] == [None, None]
        torch.testing.assert_close(model(states), before, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "difference",
    ["heads of values reversed", "scores are capped", "residual of the norm", "branch of the input"],
)
def test_what_the_op_does_not_compute_is_not_matched(difference: str) -> None:
    torch.manual_seed(0)
    model, states = _Stack(difference).eval(), torch.randn(2, 7, _HIDDEN)
    with torch.no_grad():
        before = model(states)
        accelerate_for_cpu(model, dtype="float32")
        assert all(reason is not None for _, reason in _layers(model))
        torch.testing.assert_close(model(states), before, rtol=1e-4, atol=1e-5)
