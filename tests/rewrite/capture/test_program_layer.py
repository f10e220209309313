"""Layers of unknown form run as recorded steps: equal values at all sizes, and restored completely."""

from __future__ import annotations

import copy
import cProfile
import inspect
import pickle
import warnings
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.rewrite.capture.program_layer import ProgramLayer
from tests.rewrite.capture.models import MODELS, Stack, Written, made

TOLERANCES = {"float32": 2e-5, "bfloat16": 0.04, "int8": 0.1}
# Batch, length, and how many of the last tokens are hidden: each form of call at several sizes, and one again.
SIZES = [(2, 48, 0), (2, 64, 16), (3, 96, 32), (1, 48, 0), (2, 48, 0), (3, 80, 16)]


def run(model: nn.Module, *args: Any, **batch: Any) -> Tensor:
    with torch.no_grad():
        output = model(*args, **batch)
    return output if isinstance(output, Tensor) else output[0]


def told(output: Tensor, batch: int, length: int, hidden: int) -> Tensor:
    """Return the rows of visible tokens; other rows are undefined."""
    if not hidden or output.dim() != 3:
        return output
    return torch.cat((output[:-1].flatten(0, 1), output[-1, : output.shape[1] * (length - hidden) // length]))


def error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.float() - theirs).norm() / theirs.norm())


def recorded(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, ProgramLayer)]


def in_use(model: nn.Module) -> list[Any]:
    return [program for layer in recorded(model) for program in layer._programs.values() if program]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", MODELS)
def test_values_and_the_way_back(name: str, dtype: str) -> None:
    model, batch_of = made(name), MODELS[name][1]
    originals = [(path, type(module)) for path, module in model.named_modules()]
    batches = [batch_of(*size) for size in SIZES]
    expected = [run(model, **batch) for batch in batches]
    accelerate_for_cpu(model, dtype=dtype)
    for batch, theirs, size in zip(batches, expected, SIZES, strict=True):
        ours = run(model, **batch)
        assert error(told(ours, *size), told(theirs, *size)) <= TOLERANCES[dtype]
    assert len(recorded(model)) == explain(model).counts()["recorded layer"] >= 1
    assert in_use(model)
    assert not any(program.is_pinned for program in in_use(model))
    parametrized = any(map(parametrize.is_parametrized, model.modules()))  # which torch does not copy
    for other in () if parametrized else (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for _ in range(2):
            assert error(run(other, **batches[0]), run(model, **batches[0])) <= 1e-5
    restore(model)
    assert [(path, type(module)) for path, module in model.named_modules()] == originals
    assert all(torch.equal(run(model, **b), theirs) for b, theirs in zip(batches, expected, strict=True))


def test_steps_are_taken_and_not_the_forward() -> None:
    model = accelerate_for_cpu(made("detr"), dtype="float32")
    batch = MODELS["detr"][1](2, 48, 0)
    for _ in range(2):  # the first is recorded, the second compared
        run(model, **batch)
    (kind,) = {layer._original_class for layer in recorded(model)}
    forward = inspect.unwrap(kind.forward).__code__
    with cProfile.Profile() as profiler:
        first = run(model, **batch)
    assert forward not in [entry.code for entry in profiler.getstats()]
    assert torch.equal(run(model, **batch), first)


def test_a_class_whose_forward_a_user_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    model = accelerate_for_cpu(made("detr"), dtype="float32")
    batch = MODELS["detr"][1](2, 48, 0)
    first = [run(model, **batch) for _ in range(3)][-1]
    (kind,) = {layer._original_class for layer in recorded(model)}
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, *args, **kwargs: 2 * forward(self, *args, **kwargs))
    doubled = run(model, **batch)
    assert error(doubled, first) > 1e-3
    assert error(doubled, run(restore(copy.deepcopy(model)), **batch)) <= 1e-5
    monkeypatch.setattr(kind, "forward", forward)
    assert torch.equal(run(model, **batch), first)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_under_every_mode_of_gradients(mode: Any) -> None:
    model = made("instructblip q-former")
    batch = MODELS["instructblip q-former"][1](2, 8, 2)
    expected = run(model, **batch)
    accelerate_for_cpu(model, dtype="float32")
    with mode():
        for _ in range(3):
            assert error(model(**batch)[0].detach(), expected) <= 1e-5
    assert in_use(model)


def test_hooks_inside_see_what_they_saw() -> None:
    model = accelerate_for_cpu(made("detr"), dtype="float32")
    batch = MODELS["detr"][1](2, 48, 0)
    without = run(model, **batch)
    seen: list[Any] = []
    handle = model.layers[0].mlp.register_forward_hook(lambda _, args, output: seen.append(output.shape))
    assert error(run(model, **batch), without) <= 1e-5
    assert seen == [(2, 7, 64)]
    handle.remove()
    run(model, **batch)
    assert len(seen) == 1


def test_a_cast_model_records_anew() -> None:
    model = made("detr")
    batch = MODELS["detr"][1](2, 48, 0)
    expected = run(model, **batch)
    accelerate_for_cpu(model, dtype="float32")
    run(model, **batch)
    model.to(torch.bfloat16)
    assert not in_use(model)
    narrow = {name: value.bfloat16() if value is not None else None for name, value in batch.items()}
    assert error(run(model, **narrow), expected) <= 0.04
    assert error(run(model, **narrow), expected) <= 0.04


def test_written_biases_and_norms_are_read_anew() -> None:
    model = accelerate_for_cpu(made("detr"), dtype="float32")
    batch = MODELS["detr"][1](2, 48, 0)
    before = run(model, **batch)
    with torch.no_grad():
        model.layers[0].mlp.fc2.bias.add_(3)
        model.layers[1].final_layer_norm.weight.mul_(-1)
    after = run(model, **batch)
    restore(model)
    assert error(after, before) > 0.1
    assert error(after, run(model, **batch)) <= 1e-5


@pytest.mark.parametrize("value", ["now", "background"])
def test_values_of_compile_from_earlier_versions_record_layers_and_warn_once(value: str) -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        for _ in range(2):
            model = Stack(Written(plain), Written(plain)).eval()
            hidden = states(2, 5)
            expected = run(model, hidden)
            accelerate_for_cpu(model, dtype="float32", compile=value)
            assert error(run(model, hidden), expected) <= 1e-5
            assert explain(model).counts()["recorded layer"] == 2
    (warning,) = [one for one in found if one.category is FutureWarning]
    assert f"compile={value!r} compiles nothing" in str(warning.message)
    assert 'torch.compile(model, backend="hf_cpu_accel")' in str(warning.message)


def plain(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    scores = query @ key.transpose(-1, -2) / 4.0
    return (scores if bias is None else scores + bias).softmax(-1) @ value


def called(layer: nn.Module, *calls: tuple[Any, ...]) -> tuple[nn.Module, list[float]]:
    """A stack of that layer, accelerated, and the errors of calls."""
    torch.manual_seed(0)
    model = Stack(layer, copy.deepcopy(layer)).eval()
    expected = [run(model, *args) for args in calls]
    accelerate_for_cpu(model, dtype="float32")
    return model, [error(run(model, *args), theirs) for args, theirs in zip(calls, expected, strict=True)]


def reasons(model: nn.Module) -> set[str | None]:
    return {item.reason for item in explain(model).left if item.structure == "recorded layer"}


def states(*shape: int) -> Tensor:
    return torch.randn(*shape, 64)


def test_one_call_is_right_and_at_other_sizes_too() -> None:
    bias = torch.randn(1, 4, 7, 7)
    calls = [(states(2, 7),), (states(3, 9),), (states(1, 40),), (states(2, 7), bias), (states(5, 7), bias)]
    model, errors = called(Written(plain), *calls, *calls)
    assert max(errors) <= 1e-5
    assert not reasons(model)
    assert {len(layer._programs) for layer in recorded(model)} == {2}


def test_a_branch_on_a_size_is_taken_again() -> None:
    class Branching(Written):
        def forward(self, hidden: Tensor) -> Tensor:
            output = super().forward(hidden)
            return output * 2 if hidden.shape[1] > 8 else output

    calls = [(states(2, 7),), (states(2, 6),), (states(2, 9),), (states(2, 7),)]
    assert max(called(Branching(plain), *calls)[1]) <= 1e-5


def test_a_branch_on_a_value_is_taken_again() -> None:
    class Choosing(Written):
        def forward(self, hidden: Tensor) -> Tensor:
            output = super().forward(hidden)
            return -output if hidden[0, 0, 0] > 0 else output

    first = states(2, 7)
    model, errors = called(Choosing(plain), (first,), (-first,), (first,), (-first,))
    assert max(errors) <= 1e-5
    assert in_use(model)


class Random(Written):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) + torch.rand(1) * 1e-9


class Writing(Written):
    def forward(self, hidden: Tensor, counts: Tensor) -> Tensor:
        counts.add_(1)
        return super().forward(hidden) * counts


class Elsewhere(Written):
    factor: ClassVar = [torch.full((1,), 2.0)]

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) * self.factor[0]


def bent(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    return (query @ key.transpose(-1, -2)).sin().softmax(-1) @ value


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (Random(plain), "random numbers"),
        (Writing(plain), "writes to its arguments"),
        (Elsewhere(plain), "not an argument, parameter or buffer"),
        (Written(bent), "PyTorch computes part of it (softmax)"),
    ],
)
def test_what_is_refused(layer: nn.Module, reason: str) -> None:
    more = [torch.zeros(1)] if isinstance(layer, Writing) else []
    given = [states(2, 7), *more], [states(2, 7), *more]
    torch.manual_seed(0)
    model = Stack(layer, copy.deepcopy(layer)).eval()
    expected = [run(model, *args) for args in copy.deepcopy(given)]
    accelerate_for_cpu(model, dtype="float32")
    for args, theirs in zip(given, expected, strict=True):
        assert error(run(model, *args), theirs) <= 1e-5  # what it writes is written once
    assert not in_use(model)
    assert all(reason in (said or "") for said in reasons(model))
    assert len(reasons(model)) == 1


def test_arguments_that_no_program_takes() -> None:
    model, errors = called(Written(plain), (states(2, 7), None, object()))
    assert max(errors) <= 1e-5
    assert reasons(model) == {"calls with object arguments are not recorded"}
    assert (
        error(run(model, states(2, 7)), run(restore(model), states(2, 7))) > 0
    )  # other numbers, and no exception


def test_one_tensor_given_twice_is_another_form() -> None:
    class Both(Written):
        def forward(self, hidden: Tensor, other: Tensor) -> Tensor:
            return super().forward(hidden) + other

    class Twice(Stack):
        def forward(self, hidden: Tensor, other: Tensor | None = None) -> Tensor:
            for layer in self.layers:
                hidden = layer(hidden, hidden if other is None else other)
            return hidden

    torch.manual_seed(0)
    model = Twice(Both(plain), Both(plain)).eval()
    calls = [(states(2, 7),), (states(2, 7), states(2, 7)), (states(2, 7),)]
    expected = [run(model, *args) for args in calls]
    accelerate_for_cpu(model, dtype="float32")
    assert max(error(run(model, *a), theirs) for a, theirs in zip(calls, expected, strict=True)) <= 1e-5


def test_many_forms_do_not_fill_the_memory() -> None:
    calls = [(states(2, 7), None, number / 7) for number in range(20)]
    model, errors = called(Written(plain), *calls)
    assert max(errors) <= 1e-5
    assert {len(layer._programs) for layer in recorded(model)} == {8}
