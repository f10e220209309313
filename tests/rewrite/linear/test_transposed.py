"""Linears that store their weight transposed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.check import row_error
from hf_cpu_accel.rewrite.linear.transposed import STRUCTURE

X = torch.randn(2, 5, 48)


class Holder(nn.Module):
    """Gives a module a parent."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Twice(Conv1D):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def conv1d(out_features: int, kind: type[nn.Module] = Conv1D) -> nn.Module:
    module = kind(out_features, 48)
    nn.init.normal_(module.bias)
    return Holder(module).eval()


@pytest.mark.parametrize("out_features", [48, 96])
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 1e-2), ("int8", 3e-2)])
@torch.no_grad()
def test_it_is_packed_and_comes_back(out_features: int, dtype: str, bound: float) -> None:
    model = conv1d(out_features)
    before, weight = model(X), model.inner.weight.clone()
    accelerate_for_cpu(model, dtype=dtype)
    assert explain(model).counts() == {STRUCTURE: 1}
    assert row_error(model(X), before) <= bound
    state = model.state_dict()
    assert list(state) == ["inner.weight", "inner.bias"]
    for seen in (state["inner.weight"], model.inner.weight):
        assert seen.shape == (48, out_features)
        assert row_error(seen + 0, weight) <= bound
    restore(model)
    assert torch.equal(model.inner.weight, weight)
    assert torch.equal(model(X), before)


def test_what_computes_something_else_is_left() -> None:
    model = accelerate_for_cpu(conv1d(48, Twice), dtype="float32")
    assert explain(model).counts() == {}


def test_skipped_ones_are_left() -> None:
    model = accelerate_for_cpu(conv1d(48), dtype="float32", skip_modules=("inner",))
    assert [(item.structure, item.reason) for item in explain(model).left] == [(STRUCTURE, "skip_modules")]


def test_four_bits_come_in_the_groups_that_were_asked_for() -> None:
    model = Holder(Conv1D(64, 128)).eval()
    accelerate_for_cpu(model, dtype="int4", int4_group=64)
    assert model.inner.packed.data.shape[1] == 128 // 64
