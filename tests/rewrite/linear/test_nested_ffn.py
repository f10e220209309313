"""Feed-forward networks as diffusers builds them: the first linear in one module with its activation or gate."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from diffusers.hooks import HookRegistry, ModelHook
from diffusers.models.attention import FeedForward
from torch import Tensor, nn
from torch.nn import functional

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.rewrite.linear.nested_ffn import FusedNestedFFN

TOLERANCES = {"float32": 1e-5, "bfloat16": 0.02, "int8": 0.05}
# diffusers' name -> (our activation, whether the second half is the gate, or None without one)
KINDS = {
    "gelu": ("gelu", None),
    "gelu-approximate": ("gelu_tanh", None),
    "geglu": ("gelu", True),
    "geglu-approximate": ("quick_gelu", None),
    "swiglu": ("silu", True),
}


class GateFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(48, 256)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.proj(x).chunk(2, dim=-1)
        return functional.silu(gate) * value


class Added(GateFirst):
    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.proj(x).chunk(2, dim=-1)
        return functional.silu(gate) + value


class Scaled(GateFirst):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Network(nn.Sequential):
    def __init__(self, first: nn.Module) -> None:
        super().__init__(first, nn.Dropout(0.1), nn.Linear(128, 48))


def model_of(layer: nn.Module) -> tuple[nn.Module, Tensor]:
    return nn.ModuleDict({"ff": layer}).eval(), torch.randn(2, 37, 48)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_the_way_back(kind: str, dtype: str) -> None:
    model, x = model_of(FeedForward(48, inner_dim=128, activation_fn=kind, final_dropout=True))
    original, expected = model["ff"], model["ff"](x).detach()
    accelerate_for_cpu(model, dtype=dtype)
    fused = model["ff"]
    assert isinstance(fused, FusedNestedFFN)
    assert isinstance(fused, FeedForward)
    assert (fused._ffn.activation, fused._ffn.gate_last) == KINDS[kind]
    assert explain(model).counts()["nested ffn"] == 1
    for input in (x, x[:, :1], x.transpose(1, 2).contiguous().transpose(1, 2)):
        reference = expected[:, : input.shape[1]]
        assert (fused(input) - reference).norm() <= TOLERANCES[dtype] * reference.norm()
    restore(model)
    assert model["ff"] is original
    assert torch.equal(original(x), expected)


def test_the_gate_may_come_first() -> None:
    model, x = model_of(Network(GateFirst()))
    expected = model["ff"](x).detach()
    accelerate_for_cpu(model, dtype="float32")
    assert model["ff"]._ffn.gate_last is False
    torch.testing.assert_close(model["ff"](x), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("first", [Added, Scaled])
def test_what_computes_something_else_is_left(first: type[nn.Module]) -> None:
    model, x = model_of(Network(first()))
    expected = model["ff"](x).detach()
    accelerate_for_cpu(model, dtype="float32")
    assert "nested ffn" not in explain(model).counts()
    torch.testing.assert_close(model["ff"](x), expected, atol=1e-5, rtol=1e-5)


def test_hooks_inside_see_what_they_would() -> None:
    model, x = model_of(FeedForward(48, inner_dim=128))
    expected = model["ff"](x).detach()
    accelerate_for_cpu(model, dtype="float32")
    seen: list[tuple[int, ...]] = []
    model["ff"].net[0].proj.register_forward_hook(lambda *args: seen.append(tuple(args[2].shape)))
    torch.testing.assert_close(model["ff"](x), expected, atol=1e-5, rtol=1e-5)
    assert seen == [(2, 37, 256)]


@pytest.mark.parametrize("path", ["net.0.proj", "net.2", "net.1", ""])
def test_hooks_of_diffusers_see_what_they_would(path: str) -> None:
    """They replace the forward of a module."""

    class Doubling(ModelHook):
        def post_forward(self, module: nn.Module, output: Tensor) -> Tensor:
            return 2 * output

    def hook(model: nn.Module) -> HookRegistry:
        module = model["ff"].get_submodule(path)  # type: ignore[index]
        registry = HookRegistry.check_if_exists_or_initialize(module)
        registry.register_hook(Doubling(), "doubling")
        return registry

    layer = FeedForward(48, inner_dim=128, activation_fn="geglu")
    model, input = model_of(layer)
    twin = copy.deepcopy(model)
    hook(twin)
    expected, plain = (one["ff"](input).detach() for one in (twin, model))  # type: ignore[index]
    assert not torch.allclose(expected, plain, atol=1e-3)
    accelerate_for_cpu(model, dtype="float32")
    registry = hook(model)
    torch.testing.assert_close(model["ff"](input), expected, atol=1e-5, rtol=1e-5)  # type: ignore[index]
    registry.remove_hook("doubling")
    torch.testing.assert_close(model["ff"](input), plain, atol=1e-5, rtol=1e-5)  # type: ignore[index]
    hook(model)
    restore(model)
    torch.testing.assert_close(model["ff"](input).detach(), expected, atol=0, rtol=0)  # type: ignore[index]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_copies_and_casts(dtype: str, duplicate: object) -> None:
    model, x = model_of(FeedForward(48, inner_dim=128))
    accelerate_for_cpu(model, dtype=dtype)
    expected = model["ff"](x)
    other = duplicate(model)  # type: ignore[operator]
    assert isinstance(other["ff"], FusedNestedFFN)
    torch.testing.assert_close(other["ff"](x), expected, atol=1e-6, rtol=1e-5)
    other.bfloat16()
    output = other["ff"](x.bfloat16())
    assert output.dtype is torch.bfloat16
    assert (output - expected).norm() <= 0.03 * expected.norm()


def test_gradients_are_refused() -> None:
    model, x = model_of(FeedForward(48, inner_dim=128))
    accelerate_for_cpu(model, dtype="float32")
    with pytest.raises(RuntimeError, match="requires a gradient"):
        model["ff"](x.requires_grad_())
