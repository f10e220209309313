"""Copies that share weights: changes of them do not affect the module, and they call no hooks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from diffusers.hooks import HookRegistry, ModelHook
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations

from hf_cpu_accel import accelerate_for_cpu
from hf_cpu_accel.rewrite.core.foreign_code import attempt, call_foreign
from hf_cpu_accel.rewrite.core.refusal import Refusal
from hf_cpu_accel.rewrite.core.shadow_copy import Shadow, shadow_of
from tests.rewrite.encoder_families import bert, inputs, run


class Layer(nn.Module):
    """With modules where torch does not look for them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("steps", torch.zeros(()))
        self.listed: list[Any] = [self.first, (self.second, 3)]
        self.named = {"last": self.second}
        self.act = self.bent
        self.outside = [nn.Linear(8, 8)]

    def bent(self, x: Tensor) -> Tensor:
        return x.tanh() * self.first.weight.sum()

    def forward(self, x: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return self.outside[0](self.named["last"](self.act(self.listed[0](x))) + self.listed[1][0](x))


def registered_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the registered parameters, without packed weights: each call of `parameters` creates them again."""
    return [parameter for _, parameter in module.named_parameters(remove_duplicate=False)]


def state_of(module: nn.Module) -> list[Any]:
    """All that could be changed in a tree of modules, by identity."""
    held: list[Any] = []
    for part in module.modules():
        held += [type(part), *((name, id(value)) for name, value in vars(part).items())]
        tables = [value for value in vars(part).values() if isinstance(value, dict)]
        held += [(key, id(value)) for table in tables for key, value in table.items()]
    held += [(p._version, p.data_ptr()) for p in (*registered_parameters(module), *module.buffers())]
    return held


def test_the_same_weights_in_other_modules() -> None:
    layer, x = Layer(), torch.randn(2, 8)
    expected, before = layer(x), state_of(layer)
    shadow = Shadow(layer)
    made = shadow.module
    assert isinstance(made, Layer)
    assert torch.equal(made(x), expected)
    assert all(p is q for p, q in zip(made.parameters(), layer.parameters(), strict=True))
    assert not set(map(id, made.modules())) & set(map(id, layer.modules()))
    assert made.listed[0] is made.first
    assert made.listed[1] == (made.second, 3)
    assert made.named["last"] is made.second
    assert made.act.__self__ is made
    assert made.outside is layer.outside
    assert shadow.of(layer.first) is made.first
    assert shadow.original(made.first) is layer.first
    assert shadow.original(layer.outside[0]) is layer.outside[0]
    made.calls, made.extra = 7, nn.Identity()
    made.first.weight = nn.Parameter(torch.zeros(8, 8))
    made.register_forward_hook(lambda module, args, output: output * 2)
    made.first.__class__ = nn.Identity
    functional_call(made, {"second.weight": torch.ones(8, 8)}, x)
    assert state_of(layer) == before
    assert torch.equal(layer(x), expected)


def test_hooks_of_the_user_are_not_called() -> None:
    layer, called = Layer(), []
    layer.register_forward_hook(lambda *_: called.append("torch"))
    layer.first.register_forward_pre_hook(lambda *_: called.append("torch"))
    shadow_of(layer)(torch.randn(2, 8))
    assert not called
    layer(torch.randn(2, 8))
    assert called == ["torch", "torch"]


def test_hooks_of_diffusers_and_accelerate_are_not_called() -> None:
    class Doubling(ModelHook):
        def post_forward(self, module: nn.Module, output: Tensor) -> Tensor:
            return 2 * output

    layer, x = Layer(), torch.randn(2, 8)
    expected = layer(x)
    HookRegistry.check_if_exists_or_initialize(layer.second).register_hook(Doubling(), "doubling")
    layer.first._hf_hook, layer.first._old_forward = object(), layer.first.forward
    layer.first.forward = lambda x: layer.first._old_forward(x) * 3
    assert not torch.allclose(layer(x), expected)
    assert torch.equal(shadow_of(layer)(x), expected)


def test_a_forward_of_the_users_is_kept() -> None:
    layer, x = Layer(), torch.randn(2, 8)
    layer.first.forward = lambda x: x * 2
    assert torch.equal(shadow_of(layer)(x), layer(x))


def test_parametrized_weights() -> None:
    layer, x = parametrizations.weight_norm(nn.Linear(8, 8)), torch.randn(2, 8)
    made = shadow_of(layer)
    assert torch.equal(made(x), layer(x))
    made.parametrizations.weight.original0 = nn.Parameter(torch.ones(8, 1))
    assert not torch.allclose(made(x), layer(x))


def test_scripted_modules_are_shared() -> None:
    layer = nn.Sequential(torch.jit.script(nn.ReLU()), nn.Linear(8, 8))
    made = shadow_of(layer)
    assert made[0] is layer[0]
    assert made[1] is not layer[1]


def test_what_cannot_be_copied_is_refused() -> None:
    class Singular(nn.Linear):
        def __new__(cls, size: int) -> Singular:
            return super().__new__(cls)

        def __init__(self, size: int) -> None:
            super().__init__(size, size)

    refusal = attempt("layers.0", partial(shadow_of, Singular(3)))
    assert isinstance(refusal, Refusal)
    assert "TypeError" in refusal.reason


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_accelerated_models(dtype: str) -> None:
    model = accelerate_for_cpu(bert(), dtype=dtype)
    batch = inputs(model)
    expected, before = run(model, batch), state_of(model)
    made = shadow_of(model)
    assert torch.equal(run(made, batch), expected)
    assert state_of(model) == before


class Merged(nn.Linear):
    """An adapter that takes itself out of its weight, as those of peft do."""

    merged = True

    def forward(self, x: Tensor) -> Tensor:
        if self.merged:
            self.weight.data -= 1
            self.merged = False
        return super().forward(x)


def test_a_forward_that_writes_to_its_weights_is_refused() -> None:
    layer = nn.Sequential(Merged(8, 8))
    before, shadow = layer[0].weight.detach().clone(), Shadow(layer)

    def look() -> Any:
        with shadow.running():
            return call_foreign(shadow.module, torch.randn(2, 8))

    refusal = attempt("0", look)
    assert isinstance(refusal, Refusal)
    assert "writes to its weights" in refusal.reason
    assert torch.equal(layer[0].weight, before)
    assert layer[0].merged


def test_other_writes_are_none_of_its_business() -> None:
    shadow = Shadow(nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True)))
    with torch.no_grad(), shadow.running():
        assert (shadow.module(torch.randn(2, 8)) >= 0).all()


def test_a_copy_has_the_attributes_of_its_module() -> None:
    """Compiled blocks are recognized by the attributes that were read while a shadow of one was traced."""
    layer = Layer()
    for one, other in zip(shadow_of(layer).modules(), layer.modules(), strict=True):
        assert vars(one).keys() == vars(other).keys()
