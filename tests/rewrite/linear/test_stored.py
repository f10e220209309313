"""Linears over a quantized checkpoint: packed together where they share an input, exact, and restored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.gguf.utils import GgufLinear

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.checkpoints.gguf import FORMATS, read_blocks
from hf_cpu_accel.rewrite.linear.layer import PackedLinear
from tests.checkpoints.test_gguf import random_rows

Q4_0, Q4_1, Q6_K, IQ2_XXS = 2, 3, 14, 16


def stored(ggml_type: int, out_features: int, in_features: int = 256, *, bias: bool = False) -> GgufLinear:
    linear = GgufLinear(in_features, out_features, ggml_type, bias)
    if ggml_type in FORMATS:
        form = FORMATS[ggml_type]
        rows = random_rows(ggml_type, out_features, in_features // form.features)
        linear.weight.data = rows
    if bias:
        linear.bias.data = torch.randn(out_features)
    return linear


class Projections(nn.Module):
    def __init__(self, *linears: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(256)
        for name, linear in zip("qkvo", linears, strict=False):
            self.add_module(name, linear)

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.norm(x)
        return [linear(x) for name, linear in self.named_children() if name != "norm"]


def outputs(model: nn.Module, x: Tensor) -> list[Tensor]:
    with torch.no_grad():
        return model(x)


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kinds", [(Q4_1, Q4_1, Q4_1), (Q4_0, Q6_K, Q4_1)], ids=["alike", "mixed"])
def test_projections_side_by_side_are_exact(kinds: tuple[int, ...], compute: torch.dtype) -> None:
    model = Projections(*(stored(kind, size) for kind, size in zip(kinds, (64, 32, 40), strict=True)))
    model = model.to(compute).eval()
    x = torch.randn(5, 256).to(compute)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        rows = model.norm(x)
    accelerate_for_cpu(model, dtype="float32")
    packed = [module for module in model.modules() if isinstance(module, PackedLinear)]
    assert len(packed) == 3
    assert len({id(linear.group) for linear in packed}) == 1
    assert {linear.packed_dtype for linear in packed} == {"affine4" if kinds[1] == Q4_1 else "affine8"}
    for given, kind, linear in zip(outputs(model, x), kinds, packed, strict=True):
        blocks = before[{64: "q", 32: "k", 40: "v"}[linear.out_features] + ".weight"]
        truth = F.linear(rows.double(), read_blocks(blocks, kind).dequantize().double())
        bound = 2e-4 if compute is torch.float32 else 1e-2
        assert (given - truth).abs().max() <= bound * truth.abs().max()
        assert given.dtype is compute
    restore(model)
    after: dict[str, Any] = model.state_dict()
    assert list(after) == list(before)
    assert all(
        torch.equal(after[name], value) and after[name].dtype == value.dtype for name, value in before.items()
    )


def test_a_form_of_vectors_stays_and_is_said() -> None:
    model = Projections(stored(IQ2_XXS, 64), stored(Q4_1, 64, bias=True)).eval()
    nn.init.zeros_(model.q.weight)
    accelerate_for_cpu(model, dtype="float32")
    items = {item.name: item for item in explain(model).items}
    assert isinstance(model.q, GgufLinear)
    assert items["q"].reason == "GGUF 16: codebooks of vectors are not supported"
    assert items["k"].dtype == "affine4"


def test_a_permuted_input_stays_and_is_said() -> None:
    linear = stored(Q4_1, 64)
    linear.input_permutation = torch.randperm(256)
    model = Projections(linear, stored(Q4_1, 64)).eval()
    accelerate_for_cpu(model)
    assert (
        next(i for i in explain(model).items if i.name == "q").reason
        == "GGUF Q4_1: a permuted input is not supported"
    )


def test_originals_in_memory_and_dropped() -> None:
    for originals in ("memory", "drop"):
        model = Projections(stored(Q4_1, 64)).eval()
        blocks = model.q.weight.data.clone()
        accelerate_for_cpu(model, originals=originals)
        if originals == "drop":
            with pytest.raises(RuntimeError, match="originals='drop'"):
                restore(model)
            continue
        restore(model)
        assert torch.equal(model.q.weight, blocks)
