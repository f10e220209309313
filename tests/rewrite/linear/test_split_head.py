"""Vocabulary heads in two matrices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import MobileBertConfig, MobileBertForMaskedLM

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.check import row_error
from hf_cpu_accel.rewrite.linear.split_head import FusedSplitHead

VOCABULARY, WIDTH, NARROW = 200, 96, 32
X = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(0))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transform = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.dense = nn.Linear(VOCABULARY, WIDTH - NARROW, bias=False)
        self.decoder = nn.Linear(NARROW, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        x = self.transform(x)
        return x @ torch.cat([self.decoder.weight.t(), self.dense.weight]) + self.decoder.bias


class OtherOrder(Head):
    def forward(self, x: Tensor) -> Tensor:
        x = self.transform(x)
        return x @ torch.cat([self.dense.weight, self.decoder.weight.t()]) + self.decoder.bias


class WithoutBias(Head):
    def forward(self, x: Tensor) -> Tensor:
        return self.transform(x) @ torch.cat([self.decoder.weight.t(), self.dense.weight])


def model_of(kind: type[Head] = Head) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(kind(), nn.Identity()).eval()


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 1e-2), ("int8", 3e-2)])
@torch.no_grad()
def test_it_is_fused_and_comes_back(dtype: str, bound: float) -> None:
    model = model_of()
    before, state = model(X), {name: value.clone() for name, value in model.state_dict().items()}
    accelerate_for_cpu(model, dtype=dtype)
    assert explain(model).counts()["split head"] == 1
    assert isinstance(model[0], FusedSplitHead)
    assert isinstance(model[0], Head)
    assert row_error(model(X), before) <= bound
    assert {name: value.shape for name, value in model.state_dict().items()} == {
        name: value.shape for name, value in state.items()
    }
    restore(model)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(model(X), before)


@torch.no_grad()
def test_what_hooks_change_inside_counts() -> None:
    model = model_of()
    handle = model[0].transform.register_forward_hook(lambda module, args, output: 2 * output)
    expected = model(X)
    handle.remove()
    accelerate_for_cpu(model, dtype="float32")
    model[0].transform.register_forward_hook(lambda module, args, output: 2 * output)
    assert row_error(model(X), expected) <= 1e-5


@pytest.mark.parametrize("kind", [OtherOrder, WithoutBias])
@torch.no_grad()
def test_heads_that_compute_something_else_are_left(kind: type[Head]) -> None:
    model = model_of(kind)
    before = model(X)
    accelerate_for_cpu(model, dtype="float32")
    assert "split head" not in explain(model).counts()
    assert row_error(model(X), before) <= 1e-5


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@torch.no_grad()
def test_of_mobilebert_whose_decoder_is_tied(dtype: str) -> None:
    torch.manual_seed(0)
    config = MobileBertConfig(vocab_size=300, num_hidden_layers=1)
    model = MobileBertForMaskedLM(config).eval()
    nn.init.normal_(model.cls.predictions.bias)
    ids = torch.arange(1, 21).view(2, 10)
    before, embeddings = model(ids).logits, model.get_input_embeddings().weight
    accelerate_for_cpu(model, dtype=dtype)
    assert explain(model).counts()["split head"] == 1
    assert row_error(model(ids).logits, before) <= {"float32": 1e-5, "int8": 3e-2}[dtype]
    assert model.get_input_embeddings().weight is embeddings
    restore(model)
    assert torch.equal(model(ids).logits, before)
