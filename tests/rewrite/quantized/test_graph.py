"""Graphs of PT2E: exported, with dequantized weights and rounded activations."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # declares the ops
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.rewrite.convolution.layer import PackedConvolution
from hf_cpu_accel.rewrite.linear.layer import PackedLinear
from hf_cpu_accel.rewrite.quantized.graph import with_lowered
from hf_cpu_accel.runtime import hardware

ROUNDING = torch.ops.quantized_decomposed


class Product(nn.Module):
    """A linear or a convolution: the weight in 8 bits and a step per output, the input rounded in one of several ways."""

    def __init__(self, layer: nn.Linear | nn.Conv2d, rounded: str) -> None:
        super().__init__()
        weight = layer.weight.detach()
        scale = weight.abs().flatten(1).amax(1).double() / 127
        zeros = torch.zeros_like(scale).long()
        values = ROUNDING.quantize_per_channel(weight, scale, zeros, 0, -127, 127, torch.int8)
        for name, tensor in (("values", values), ("scale", scale), ("zeros", zeros)):
            self.register_buffer(name, tensor)
        self.bias, self.rounded, self.layer = layer.bias, rounded, [layer]

    def forward(self, x: Tensor) -> Tensor:
        x = rounded(x, self.rounded)
        weight = ROUNDING.dequantize_per_channel(
            self.values, self.scale, self.zeros, 0, -127, 127, torch.int8
        )
        layer = self.layer[0]
        if isinstance(layer, nn.Linear):
            return F.linear(x, weight, self.bias)
        return F.conv2d(x, weight, self.bias, layer.stride, layer.padding, layer.dilation, layer.groups)


def rounded(x: Tensor, how: str) -> Tensor:
    if how == "no":
        return x
    step, zero = (0.03, 120) if how == "static" else ROUNDING.choose_qparams(x, 0, 255, 1e-5, torch.uint8)
    x = ROUNDING.quantize_per_tensor(x, step, zero, 0, 255, torch.uint8)
    return ROUNDING.dequantize_per_tensor(x, step, zero, 0, 255, torch.uint8)


class Network(nn.Module):
    """Convolutions, a sum of rounded values, and linears, two of them with the same input."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.plain = nn.ModuleDict(
            {
                "stem": nn.Conv2d(32, 64, 3, stride=2, padding=1),
                "grouped": nn.Conv2d(64, 64, 3, padding=1, groups=64),
                "key": nn.Linear(64, 64),
                "value": nn.Linear(64, 64, bias=False),
                "head": nn.Linear(64, 40),
            }
        )
        self.of = nn.ModuleDict({name: Product(layer, how) for name, layer in self.plain.items()})

    def run(self, x: Tensor, products: Any, how: str) -> Tensor:
        x = rounded(products["stem"](x).relu(), how)
        x = (x + rounded(products["grouped"](x), how)).flatten(2).transpose(1, 2)
        return products["head"](products["key"](x) * products["value"](x))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x, self.of, self.how)


def exported(how: str) -> tuple[Network, GraphModule, Tensor]:
    torch.manual_seed(0)
    network, x = Network(how).eval(), torch.randn(2, 32, 10, 10)
    return network, torch.export.export(network, (x,)).module(), x


def distance(given: Tensor, expected: Tensor) -> float:
    return ((given - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("how", ["static", "dynamic"])
def test_products_are_packed_in_8_bits(how: str) -> None:
    network, graph, x = exported(how)
    other = copy.deepcopy(graph)
    with torch.no_grad():
        exact, before = network.run(x, network.plain, "no"), graph(x)
        keys = list(graph.state_dict())
        accelerate_for_cpu(graph)
        given = graph(x)
        assert distance(given, exact) < 1.2 * distance(before, exact)
        assert torch.equal(other(x), before)
    assert list(graph.state_dict()) == keys
    replaced = {item.name: item for item in explain(graph).replaced}
    assert {name.split(".")[-1]: item.dtype for name, item in replaced.items()} == {
        "stem": "int8",
        "grouped": "bfloat16" if hardware.native_bf16_is_fast() else "float32",
        "key": "int8",
        "value": "int8",
        "head": "int8",
    }
    assert all("PT2E int8" in replaced[f"of.{name}"].structure for name in ("key", "value", "head"))
    assert not explain(graph).left
    lowered = with_lowered(graph)
    assert "quantized_decomposed" not in str(lowered.graph)
    assert lowered.of.key.group is lowered.of.value.group
    assert isinstance(lowered.of.stem, PackedConvolution)
    restore(graph)
    assert "forward" not in vars(graph)
    with torch.no_grad():
        assert torch.equal(graph(x), before)


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_weights_alone_in_8_bits(dtype: str, bound: float) -> None:
    _, graph, x = exported("no")
    with torch.no_grad():
        before = graph(x)
        accelerate_for_cpu(graph, dtype=dtype)
        assert distance(graph(x), before) < bound
        packed = [m.packed_dtype for m in with_lowered(graph).modules() if isinstance(m, PackedLinear)]
        assert packed == [dtype] * 3
        accelerate_for_cpu(graph)
        packed = [m.packed_dtype for m in with_lowered(graph).modules() if isinstance(m, PackedLinear)]
        assert packed == ["int8-weight"] * 3
        assert distance(graph(x), before) < 2e-2
        restore(graph)
        assert torch.equal(graph(x), before)


def test_what_was_exported_is_not_asked_for_its_mode() -> None:
    _, graph, _ = exported("static")
    graph.training = True
    accelerate_for_cpu(graph)
    assert explain(graph).replaced


def test_parts_can_be_skipped_and_named() -> None:
    network, graph, x = exported("static")
    exact, before = network.run(x, network.plain, "no"), graph(x)
    accelerate_for_cpu(graph, skip_modules=("of.key",), dtypes={"of.head": "float32"})
    plan = explain(graph)
    assert {item.name: item.reason for item in plan.left} == {"of.key": "skip_modules"}
    assert {item.name: item.dtype for item in plan.replaced}["of.head"] == "float32"
    assert distance(graph(x), exact) < 1.2 * distance(before, exact)
    restore(graph)
    assert torch.equal(graph(x), before)


def test_a_copy_is_the_graph_that_was_exported() -> None:
    _, graph, x = exported("static")
    before = graph(x)
    accelerate_for_cpu(graph)
    assert torch.equal(copy.deepcopy(graph)(x), before)


class Pieces(nn.Module):
    """Two products of one weight that is put together of two, with biases of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList(Product(nn.Linear(64, 32, bias=False), "no") for _ in range(2))
        self.biases = nn.ParameterList(torch.randn(64) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.cat(
            [
                ROUNDING.dequantize_per_channel(half.values, half.scale, half.zeros, 0, -127, 127, torch.int8)
                for half in self.halves
            ]
        )
        first, second = (F.linear(x, weight, bias) for bias in self.biases)
        return first * second.sigmoid()


def test_one_weight_of_several_parts_with_two_biases() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 64)
    graph = torch.export.export(Pieces().eval(), (x,)).module()
    with torch.no_grad():
        before = graph(x)
        accelerate_for_cpu(graph, dtype="float32")
        assert distance(graph(x), before) < 1e-5
    assert len(explain(graph).replaced) == 2
    restore(graph)
    assert torch.equal(graph(x), before)
