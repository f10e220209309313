"""Graphs that a tool of torch's has quantized: products of rounded numbers become products of packed integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # declares the ops
import torch.nn.functional as F
from torch import Tensor, nn

from hf_cpu_accel.compiler.weight_transforms import PackedLinears
from tests.compiler.conftest import only_graph

pytestmark = pytest.mark.usefixtures("no_codegen")
ROUNDING = torch.ops.quantized_decomposed


class Quantized(nn.Module):
    """A product as PT2E leaves it: the weight in 8 bits and a step per output, the input rounded in one of several ways."""

    def __init__(self, layer: nn.Linear | nn.Conv2d, rounded: str) -> None:
        super().__init__()
        weight = layer.weight.detach()
        scale = weight.abs().flatten(1).amax(1).double() / 127
        self.register_buffer(
            "weight",
            ROUNDING.quantize_per_channel(
                weight, scale, torch.zeros_like(scale).long(), 0, -127, 127, torch.int8
            ),
        )
        self.register_buffer("scale", scale)
        self.register_buffer("zeros", torch.zeros_like(scale).long())
        self.bias, self.rounded, self.is_image = layer.bias, rounded, weight.dim() == 4

    def forward(self, x: Tensor) -> Tensor:
        if self.rounded == "static":
            x = ROUNDING.quantize_per_tensor(x, 0.05, 120, 0, 255, torch.uint8)
            x = ROUNDING.dequantize_per_tensor(x, 0.05, 120, 0, 255, torch.uint8)
        elif self.rounded == "dynamic":
            step, zero = ROUNDING.choose_qparams(x, 0, 255, 1e-5, torch.uint8)
            x = ROUNDING.quantize_per_tensor(x, step, zero, 0, 255, torch.uint8)
            x = ROUNDING.dequantize_per_tensor(x, step, zero, 0, 255, torch.uint8)
        weight = ROUNDING.dequantize_per_channel(
            self.weight, self.scale, self.zeros, 0, -127, 127, torch.int8
        )
        return F.conv2d(x, weight, self.bias) if self.is_image else F.linear(x, weight, self.bias)


@pytest.mark.parametrize(
    ("rounded", "packed"), [("static", "int8"), ("dynamic", "int8"), ("no", "int8-weight")]
)
def test_a_linear_layer_is_one_call(
    rounded: str, packed: str, compiled: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = []
    make = PackedLinears.make
    monkeypatch.setattr(PackedLinears, "make", lambda self, *w: kinds.append(self.dtype) or make(self, *w))
    layer, x = nn.Linear(64, 48), torch.randn(3, 5, 64)
    module = Quantized(layer, rounded)
    with torch.no_grad():
        got, expected = compiled(module)(x), layer(x)
        theirs = (module(x) - expected).norm()
    assert (got - expected).norm() < 0.02 * expected.norm()
    assert (got - expected).norm() < 1.5 * theirs
    graph = only_graph()
    assert graph.rewrites["quantized"] == 1
    assert {name.split(".")[1]: n for name, n in graph.ours.items()} == {"linear": 1}
    assert not any("quant" in name for name in graph.rest)
    assert kinds == [packed]


def test_a_convolution_is_one_call(compiled: Callable[..., Any]) -> None:
    layer, x = nn.Conv2d(16, 32, 3), torch.randn(2, 16, 6, 7)
    with torch.no_grad():
        got, expected = compiled(Quantized(layer, "static"))(x), layer(x)
    assert 0 < (got - expected).norm() < 0.03 * expected.norm()
    assert only_graph().ours == {"hf_cpu_accel.conv2d.default": 1}


def test_the_dtype_of_the_options_goes_before(compiled: Callable[..., Any]) -> None:
    layer, x = nn.Linear(64, 48), torch.randn(3, 64)
    module = Quantized(layer, "static")
    with torch.no_grad():
        weight = ROUNDING.dequantize_per_channel(
            module.weight, module.scale, module.zeros, 0, -127, 127, torch.int8
        )
        expected = F.linear(x, weight, layer.bias)
        torch.testing.assert_close(compiled(module, dtype="float32")(x), expected, atol=1e-5, rtol=1e-4)


def test_what_else_reads_rounded_numbers_gets_them(compiled: Callable[..., Any]) -> None:
    """A sum of rounded numbers is what the tool made of it."""

    class Both(Quantized):
        def forward(self, x: Tensor) -> Tensor:
            x = ROUNDING.quantize_per_tensor(x, 0.05, 120, 0, 255, torch.uint8)
            x = ROUNDING.dequantize_per_tensor(x, 0.05, 120, 0, 255, torch.uint8)
            return super().forward(x) + x

    module, x = Both(nn.Linear(64, 64), "no"), torch.randn(3, 64)
    with torch.no_grad():
        got, expected = compiled(module)(x), module(x)
    torch.testing.assert_close(got, expected, atol=0.15, rtol=0.1)
    assert any("quantize_per_tensor" in name for name in only_graph().rest)
