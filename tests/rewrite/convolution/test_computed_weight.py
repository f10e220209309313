"""Convolutions with weight norm, as a parametrization and as a hook: packed as plain ones, and restored."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils import weight_norm as hooked_weight_norm

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.check import row_error
from hf_cpu_accel.rewrite.convolution.as_linear import OVER_TIME
from hf_cpu_accel.rewrite.convolution.image_of_time import STRUCTURE as AS_IMAGE
from hf_cpu_accel.rewrite.convolution.layer import STRUCTURE as IMAGES
from hf_cpu_accel.rewrite.convolution.transposed.over_time import STRUCTURE as TRANSPOSED
from hf_cpu_accel.runtime import hardware
from tests.rewrite.convolution.test_as_linear import BOUNDS, Holder

KINDS: dict[str, tuple[Callable[[], nn.Module], str, tuple[int, ...]]] = {
    "over time": (lambda: nn.Conv1d(32, 48, 3, stride=2, padding=1), OVER_TIME, (32, 41)),
    "without bias": (lambda: nn.Conv1d(20, 33, 4, bias=False), OVER_TIME, (20, 17)),
    "one step": (lambda: nn.Conv1d(32, 48, 1), OVER_TIME, (32, 9)),
    "gaps": (lambda: nn.Conv1d(32, 17, 3, padding=4, dilation=4), AS_IMAGE, (32, 29)),
    "transposed": (lambda: nn.ConvTranspose1d(32, 24, 8, 4), TRANSPOSED, (32, 13)),
    "image": (lambda: nn.Conv2d(32, 48, 3, padding=1), IMAGES, (32, 9, 10)),
}


def old(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        normed: nn.Module = hooked_weight_norm(module)
    return normed


FORMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "parametrization": parametrizations.weight_norm,
    "hook": old,
}


def model_of(kind: str, form: str) -> tuple[nn.Module, Tensor, str]:
    torch.manual_seed(0)
    build, structure, shape = KINDS[kind]
    model = Holder(FORMS[form](build())).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("original0", "weight_g")):
                parameter.mul_(torch.rand_like(parameter) + 0.5)
    return model, torch.randn(2, *shape), structure


def run(model: nn.Module, input: Tensor) -> Tensor:
    with torch.no_grad():
        output: Tensor = model(input)
    return output


def snapshot(model: nn.Module) -> dict[str, object]:
    return {
        "parameters": [(name, id(value)) for name, value in model.named_parameters()],
        "modules": [(name, id(module)) for name, module in model.named_modules()],
        "hooks": [list(module._forward_pre_hooks.items()) for module in model.modules()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
    }


def same_state(state: dict[str, Tensor], before: dict[str, Tensor]) -> bool:
    return list(state) == list(before) and all(torch.equal(state[name], before[name]) for name in before)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_the_way_back(kind: str, form: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "native_bf16_is_fast", lambda: True)
    model, input, structure = model_of(kind, form)
    expected = run(model, input)
    before, state = snapshot(model), {name: value.clone() for name, value in model.state_dict().items()}
    accelerate_for_cpu(model, dtype=dtype)
    structure = AS_IMAGE if dtype == "float32" and kind in ("over time", "without bias") else structure
    assert explain(model).counts() == {structure: 1}
    assert not model.inner._forward_pre_hooks or form == "parametrization"
    assert row_error(run(model, input).movedim(1, -1), expected.movedim(1, -1)) <= BOUNDS[dtype]
    assert same_state(model.state_dict(), state)
    assert [(name, id(value)) for name, value in model.named_parameters()] == before["parameters"]
    assert torch.equal(run(copy.deepcopy(model), input), run(model, input))
    restore(model)
    assert snapshot(model) == before
    assert same_state(model.state_dict(), state)
    assert torch.equal(run(model, input), expected)
    model.train()(input).square().sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", ["in place", "data", "exchanged"])
@pytest.mark.parametrize("part", [0, 1])
def test_what_the_weight_is_computed_of_is_watched(form: str, way: str, part: int) -> None:
    model, input, _ = model_of("over time", form)
    accelerate_for_cpu(model, dtype="float32")
    names = ("weight_g", "weight_v") if form == "hook" else ("original0", "original1")
    holder = model.inner if form == "hook" else model.inner.parametrizations.weight
    parameter = getattr(holder, names[part])
    with torch.no_grad():
        if way == "in place":
            parameter.mul_(2)
        elif way == "data":
            parameter.data *= 2
        else:
            setattr(holder, names[part], nn.Parameter(2 * parameter, requires_grad=False))
    with pytest.raises(RuntimeError, match=rf"{names[part]} was modified after acceleration"):
        run(model, input)


@pytest.mark.parametrize("kind", ["over time", "transposed", "gaps"])
def test_a_bias_is_followed(kind: str) -> None:
    model, input, _ = model_of(kind, "parametrization")
    eager = copy.deepcopy(model)
    accelerate_for_cpu(model, dtype="float32")
    run(model, input)
    for one in (model, eager):
        one.inner.bias.data += 1
    torch.testing.assert_close(run(model, input), run(eager, input), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_casts(form: str) -> None:
    model, input, _ = model_of("over time", form)
    expected = run(model, input)
    accelerate_for_cpu(model, dtype="float32")
    model.bfloat16()
    assert {value.dtype for value in model.state_dict().values()} == {torch.bfloat16}
    narrow = run(model, input.bfloat16())
    assert row_error(narrow.float().mT, expected.mT) <= 2e-2
    restore(model)
    assert row_error(run(model, input.bfloat16()).float().mT, expected.mT) <= 2e-2


def test_float16_weights() -> None:
    model, input, _ = model_of("over time", "parametrization")
    expected = run(model, input)
    model.half()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    accelerate_for_cpu(model, dtype="float32")
    assert explain(model).counts() == {AS_IMAGE: 1}
    assert same_state(model.state_dict(), state)
    assert row_error(run(model, input.half()).float().mT, expected.mT) <= 1e-2
    restore(model)
    assert same_state(model.state_dict(), state)


def test_pickles_of_the_hooked_form() -> None:
    """Torch pickles no parametrized module."""
    model, input, _ = model_of("transposed", "hook")
    run(model, input)
    accelerate_for_cpu(model, dtype="float32")
    other = pickle.loads(pickle.dumps(model))
    assert torch.equal(run(other, input), run(model, input))
    restore(other)
    restore(model)
    assert torch.equal(run(other, input), run(model, input))


class Noisy(nn.Module):
    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return first + torch.rand_like(second)

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return weight, torch.zeros_like(weight)


def noisy(module: nn.Module) -> nn.Module:
    parametrize.register_parametrization(module, "weight", Noisy())
    return module


def hooked(module: nn.Module) -> nn.Module:
    normed = old(module)
    normed.register_forward_hook(lambda module, args, output: output + 1)
    return normed


@pytest.mark.parametrize(
    ("build", "skip"),
    [
        (lambda: noisy(nn.Conv1d(32, 32, 3)), ()),
        (lambda: parametrizations.spectral_norm(nn.Conv1d(32, 32, 3)), ()),
        (lambda: parametrizations.weight_norm(nn.Conv1d(32, 32, 3), name="bias", dim=None), ()),
        (lambda: hooked(nn.Conv1d(32, 32, 3)), ()),
        (lambda: old(nn.Conv1d(32, 32, 3)), ("*inner",)),
        (lambda: old(nn.Conv1d(32, 32, 3, groups=32)), ()),
    ],
    ids=["noise", "spectral norm", "bias", "hooks", "skipped", "groups"],
)
def test_others_are_left(build: Callable[[], nn.Module], skip: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    model = Holder(build()).eval()
    original, input = model.inner, torch.randn(2, 32, 9)
    torch.manual_seed(0)
    expected = run(model, input)
    accelerate_for_cpu(model, dtype="int8", skip_modules=skip)
    assert not explain(model).counts()
    assert model.inner is original
    assert all(item.reason for item in explain(model).items)
    torch.manual_seed(0)
    assert torch.equal(run(model, input), expected)


def test_each_is_told() -> None:
    model, _, structure = model_of("over time", "parametrization")
    accelerate_for_cpu(model, dtype="int8")
    items = {item.name: (item.structure, item.reason) for item in explain(model).items}
    assert items["inner"] == (structure, None)
    assert "runs on packed values of its weight" in (items["inner.parametrizations.weight"][1] or "")
    assert len(items) == 2
