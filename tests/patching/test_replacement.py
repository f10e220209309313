"""Packed and fused modules are instances of the classes that they replace, and attributes set on them take effect or raise."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_cpu_accel import accelerate_for_cpu, restore
from hf_cpu_accel.lazy.lazy_weight import LazyWeight
from hf_cpu_accel.patching.replacement import Replacement
from hf_cpu_accel.rewrite.core.packed_module import PackedModule
from tests.compiler.families import FAMILIES


class RMSNorm(nn.Module):
    """As hosts write it."""

    def __init__(self, features: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(features) + 0.5)
        self.variance_epsilon = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        variance = hidden_states.float().pow(2).mean(-1, keepdim=True)
        return self.weight * hidden_states * torch.rsqrt(variance + self.variance_epsilon)


class StoredNorm(RMSNorm):
    """One whose forward reads something that no replacement has."""

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.state = object()

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) if self.state is not None else hidden_states


class NamedLinear(nn.Linear):
    """One of a host's, with a forward of its own and a way to save that is not torch's."""

    def forward(self, input: Tensor) -> Tensor:
        return input @ self.weight.T + self.bias

    def _save_to_state_dict(self, *args: Any) -> None:
        super()._save_to_state_dict(*args)


_CONVOLUTION = {"padding": 2, "stride": 2, "dilation": 2, "groups": 2}
Build = Callable[[], nn.Module]
# {name: (module, shape of its input, {attribute: another value})}; numbers of convolutions are those of each dimension.
KINDS: dict[str, tuple[Build, tuple[int, ...], dict[str, Any]]] = {
    "linear": (lambda: nn.Linear(64, 96), (3, 64), {}),
    "linear of a host": (lambda: NamedLinear(64, 96), (3, 64), {}),
    "transposed linear": (lambda: Conv1D(96, 64), (3, 64), {"nf": 4}),
    "convolution": (lambda: nn.Conv2d(32, 32, 3, padding=1), (1, 32, 9, 9), _CONVOLUTION),
    "strided convolution": (lambda: nn.Conv2d(3, 32, 7, 2, 3), (1, 3, 20, 20), _CONVOLUTION),
    "grouped convolution": (lambda: nn.Conv2d(64, 64, 3, groups=8), (1, 64, 9, 9), _CONVOLUTION),
    "pixels": (lambda: nn.Conv2d(32, 64, 1), (1, 32, 9, 9), _CONVOLUTION),
    "patches": (lambda: nn.Conv2d(3, 64, 8, 8), (1, 3, 24, 24), _CONVOLUTION),
    "patches of video": (
        lambda: nn.Conv3d(3, 64, (2, 4, 4), (2, 4, 4)),
        (1, 3, 4, 12, 12),
        {"padding": 2, "stride": 3, "dilation": 1, "groups": 3},
    ),
    "over time": (lambda: nn.Conv1d(64, 64, 3, padding=1), (1, 64, 20), _CONVOLUTION),
    "dilated over time": (lambda: nn.Conv1d(64, 64, 3, dilation=2), (1, 64, 20), _CONVOLUTION),
    "grouped over time": (
        lambda: nn.Conv1d(64, 64, 32, padding=16, groups=4),
        (1, 64, 40),
        {"padding": 2, "stride": 2, "dilation": 1, "groups": 2},
    ),
    "transposed over time": (
        lambda: nn.ConvTranspose1d(64, 32, 4, 2, 1),
        (1, 64, 9),
        {"padding": 0, "stride": 3, "dilation": 2, "output_padding": 1},
    ),
    "transposed": (
        lambda: nn.ConvTranspose2d(32, 32, 4, 2, 1),
        (1, 32, 9, 9),
        {"padding": 0, "stride": 3, "dilation": 2, "output_padding": 1},
    ),
    "norm": (lambda: RMSNorm(64), (3, 64), {"variance_epsilon": 0.7}),
    "norm of torch": (lambda: nn.RMSNorm(64, eps=1e-6), (3, 64), {"eps": 1, "normalized_shape": (32,)}),
    "layer norm": (lambda: nn.LayerNorm(64), (3, 64), {"eps": 1, "normalized_shape": (32,)}),
    "group norm": (lambda: nn.GroupNorm(8, 32), (2, 32, 6, 6), {"eps": 0.7, "num_groups": 4}),
    "batch norm": (lambda: nn.BatchNorm2d(32), (2, 32, 6, 6), {"eps": 0.7}),
    "embedding": (lambda: nn.Embedding(50, 64), (), {"padding_idx": 3}),
}


def model_of(name: str) -> tuple[nn.Module, Tensor]:
    """The module inside of one, among others, and an input."""
    build, shape, _ = KINDS[name]
    torch.manual_seed(0)
    module = build()
    after: list[nn.Module] = [nn.SiLU()] if "norm" in name else []
    if isinstance(module, nn.BatchNorm2d):
        return nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), module, nn.ReLU()).eval(), torch.randn(shape)
    input = torch.randn(shape) if shape else torch.randint(4, 50, (2, 5))
    return nn.Sequential(nn.Identity(), module, *after).eval(), input


def place_of(model: nn.Module) -> Any:
    return model[1]


def set_on(module: nn.Module, name: str, value: Any) -> None:
    """As the attribute is written: a number for each dimension."""
    now = getattr(module, name)
    setattr(module, name, (value,) * len(now) if isinstance(now, tuple) and isinstance(value, int) else value)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_it_is_an_instance_of_what_it_replaces(name: str, dtype: str) -> None:
    model, input = model_of(name)
    original = place_of(model)
    kind, state = type(original), copy.deepcopy(model.state_dict())
    accelerate_for_cpu(model, dtype=dtype)
    module = place_of(model)
    torch_kind = kind.__mro__[1] if kind is NamedLinear else kind
    assert isinstance(module, torch_kind)
    assert type(module).__mro__.count(nn.Module) == 1
    if isinstance(module, Replacement):
        assert type(module).__name__ == f"{module.prefix}{torch_kind.__name__}"
        assert repr(module).startswith(f"{type(module).__name__}(")
    if isinstance(module, PackedModule):
        assert "weight" not in module._parameters
        assert isinstance(module.weight, LazyWeight)
        with pytest.raises(RuntimeError, match="restore"):
            nn.init.zeros_(module.weight)
    output = model(input)
    assert list(model.state_dict()) == list(state)
    for other in (copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model))):
        assert type(place_of(other)) is type(module)
        torch.testing.assert_close(other(input), output)
    restored = copy.deepcopy(model)
    restore(restored)
    assert type(place_of(restored)) is kind
    restore(model)
    assert place_of(model) is original
    assert type(original) is kind


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_what_is_set_takes_effect_or_is_refused(name: str, dtype: str) -> None:
    model, input = model_of(name)
    fast = accelerate_for_cpu(copy.deepcopy(model), dtype=dtype)
    before = fast(input)
    others = dict(KINDS[name][2])
    if hasattr(place_of(model), "padding_mode"):
        others["padding_mode"] = "circular"
    for attribute, value in others.items():
        plain = copy.deepcopy(model)
        set_on(place_of(plain), attribute, value)
        old = getattr(place_of(fast), attribute)
        refused = _refusal(place_of(fast), attribute, value)
        if refused:
            assert "restore" in refused, attribute
            assert attribute in refused
            assert getattr(place_of(fast), attribute) == old
            continue
        theirs, ours = _output(plain, input), _output(fast, input)
        setattr(place_of(fast), attribute, old)
        assert (ours is None) == (theirs is None), attribute
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, atol=0.05 * float(theirs.abs().max()), rtol=0)
    setattr(place_of(fast), "training", False)  # noqa: B010 (what it is already)
    for attribute in others:
        setattr(place_of(fast), attribute, getattr(place_of(fast), attribute))
    torch.testing.assert_close(fast(input), before)


def _refusal(module: nn.Module, attribute: str, value: Any) -> str:
    try:
        set_on(module, attribute, value)
    except RuntimeError as error:
        return str(error)
    return ""


def _output(model: nn.Module, input: Tensor) -> Tensor | None:
    try:
        output: Tensor = model(input)
    except (RuntimeError, ValueError, AssertionError):
        return None
    return output


def test_attributes_that_a_user_added_are_free() -> None:
    model, _ = model_of("linear")
    place_of(model).tag = "mine"
    accelerate_for_cpu(model)
    place_of(model).tag = "other"
    assert place_of(model).tag == "other"


def test_it_is_no_instance_of_a_class_that_reads_what_it_does_not_have() -> None:
    model = accelerate_for_cpu(nn.Sequential(nn.Linear(64, 64), StoredNorm(64)).eval(), dtype="float32")
    norms = [module for module in model.modules() if isinstance(module, RMSNorm)]
    assert len(norms) == 1
    assert hasattr(norms[0], "state") or not isinstance(norms[0], StoredNorm)


def test_seamless_tiling_is_not_ignored() -> None:
    layers = nn.Conv2d(16, 32, 3, padding=1), nn.SiLU(), nn.Conv2d(32, 16, 3, padding=1)
    model = accelerate_for_cpu(nn.Sequential(*layers).eval())
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert len(convolutions) == 2
    for module in convolutions:
        with pytest.raises(RuntimeError, match=r"padding_mode='circular' cannot be set.*restore"):
            module.padding_mode = "circular"


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5", "resnet", "convnext", "wav2vec2", "mixtral"])
def test_each_module_of_a_model_is_what_it_was(name: str, dtype: str) -> None:
    model = FAMILIES[name].build()
    kinds = {path: type(module) for path, module in model.named_modules()}
    accelerate_for_cpu(model, dtype=dtype)
    modules = dict(model.named_modules())
    assert modules.keys() == kinds.keys()
    assert [path for path, module in modules.items() if not isinstance(module, kinds[path])] == []
    assert {type(module) for module in restore(model).modules()} == set(kinds.values())
