"""State of recorded layers between calls: states, results, modes, weights, errors, threads."""

from __future__ import annotations

import copy
import random
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from tests.rewrite.capture.models import Stack, Written
from tests.rewrite.capture.test_changes import Scaled
from tests.rewrite.capture.test_program_layer import error, in_use, plain, reasons, recorded, run, states


class Remembering(Written):
    def forward(self, hidden: Tensor) -> Tensor:
        self.seen = super().forward(hidden)
        return self.seen


class Counting(Written):
    def forward(self, hidden: Tensor) -> Tensor:
        self.lengths = getattr(self, "lengths", 0) + hidden.shape[1]
        return super().forward(hidden)


class Collecting(Written):
    def __init__(self, attend: Any) -> None:
        super().__init__(attend)
        self.collected: list[Any] = []

    def forward(self, hidden: Tensor) -> Tensor:
        self.collected.append(hidden.mean())
        return super().forward(hidden)


class Drawing(Written):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) * (1 if random.random() < 2 else -1)


class Setting(Written):
    def forward(self, hidden: Tensor) -> Tensor:
        output = super().forward(hidden)
        output.data = output.data * 2
        return output


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (Remembering(plain), "keeps state between calls (seen)"),
        (Counting(plain), "keeps state between calls (lengths)"),
        (Collecting(plain), "keeps state between calls (collected)"),
        (Drawing(plain), "draws random numbers"),
        (Setting(plain), "(__set__)"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_layer_keeps_or_moves_is_not_recorded(layer: nn.Module, reason: str) -> None:
    torch.manual_seed(0)
    model = Stack(layer, copy.deepcopy(layer)).eval()
    given = [states(1, 7), states(2, 7), states(2, 1), states(1, 7)]
    expected = [run(model, hidden) for hidden in given]
    accelerate_for_cpu(model, dtype="float32")
    state = random.getstate()
    ours = [run(model, hidden) for hidden in given]
    assert max(map(error, ours, expected)) <= 1e-5
    drawn = random.getstate()
    if isinstance(layer, Drawing):  # as many as by itself
        random.setstate(state)
        assert len([random.random() for _ in range(2 * len(given))]) == 8
        assert random.getstate() == drawn
    assert not in_use(model)
    assert all(reason in str(said) for said in reasons(model)), reasons(model)


@dataclass
class Output(ModelOutput):
    hidden: Any = None
    extra: Any = None


def test_what_is_given_back_is_not_that_of_an_earlier_call() -> None:
    class Telling(Written):
        def forward(self, hidden: Tensor, kind: str) -> Any:
            output = super().forward(hidden)
            if kind == "output":
                return Output(hidden=output, extra=[])
            if kind == "dict":
                return {"hidden": output, "extra": []}
            return (output, ([], {"left": [1]}))

    class First(Stack):
        def forward(self, hidden: Tensor, kind: str) -> Any:  # type: ignore[override]
            output = self.layers[0](hidden, kind)
            self.told = output
            return output[0] if isinstance(output, tuple) else output["hidden"]

    torch.manual_seed(0)
    model = First(Telling(plain), Telling(plain)).eval()
    for kind in ("output", "dict", "tuple"):
        given = [states(2, 7) for _ in range(4)]
        expected = [run(model, hidden, kind) for hidden in given]
        accelerate_for_cpu(model, dtype="float32")
        ours = []
        for hidden in given:
            ours.append(run(model, hidden, kind))
            told = model.told[1] if kind == "tuple" else model.told["extra"]
            if kind == "tuple":
                assert told == ([], {"left": [1]})
                told[1]["left"].append(2)
                told = told[0]
            assert told == []
            told.append("a caller's")
        assert max(map(error, ours, expected)) <= 1e-5
        restore(model)


def test_a_list_that_is_written_to_is_written_to_in_each_call() -> None:
    class Listing(Written):
        def forward(self, hidden: Tensor, into: list[Any]) -> Tensor:
            output = super().forward(hidden)
            into.append(output)
            return output

    model = accelerate_for_cpu(Stack(Listing(plain), Listing(plain)).eval(), dtype="float32")
    for _ in range(3):
        into: list[Any] = []
        run(model, states(2, 7), into)
        assert len(into) == 2
    assert not in_use(model)


def test_numbers_that_are_equal_but_not_alike() -> None:
    class Typed(Written):
        def forward(self, hidden: Tensor, flag: Any) -> Tensor:
            return super().forward(hidden) * (3 if isinstance(flag, bool) else 1)

    torch.manual_seed(0)
    model = Stack(Typed(plain), Typed(plain)).eval()
    calls = [(states(2, 7), flag) for flag in (True, 1.0, 1, True, 1.0, 1)]
    expected = [run(model, *args) for args in calls]
    accelerate_for_cpu(model, dtype="float32")
    assert max(error(run(model, *a), theirs) for a, theirs in zip(calls, expected, strict=True)) <= 1e-5


def test_hidden_keys_whose_scores_are_no_small_numbers() -> None:
    def filled(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        scores = (query @ key.mT * 0.25).masked_fill(bias > 1, -2.0)
        return scores.softmax(-1) @ value

    torch.manual_seed(0)
    model = Stack(Written(filled), Written(filled)).eval()
    given = [(states(2, 7), torch.full((2, 1, 1, 7), value)) for value in (0.0, 0.0, 2.0)]
    given[2][1][:, :, :, :3] = 0
    expected = [run(model, *args) for args in given]
    accelerate_for_cpu(model, dtype="float32")
    assert max(error(run(model, *a), theirs) for a, theirs in zip(given, expected, strict=True)) <= 1e-5


def test_other_modes_than_when_it_was_recorded() -> None:
    torch.manual_seed(0)
    model = Stack(Scaled(), Scaled()).eval()
    eager, hidden = copy.deepcopy(model), states(2, 7)
    accelerate_for_cpu(model, dtype="float32")
    expected = run(eager, hidden)
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode):
        with mode():
            assert error(model(hidden.clone()).detach(), expected) <= 1e-5
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert error(model(hidden), eager(hidden).float()) <= 0.03
    torch.set_default_dtype(torch.float64)
    try:
        assert error(run(model, hidden), expected) <= 1e-5
    finally:
        torch.set_default_dtype(torch.float32)
    with pytest.raises(RuntimeError, match="inference only"):
        model.train()(hidden)
    model.eval()
    assert error(run(model, hidden), expected) <= 1e-5
    assert error(run(torch.compile(model, backend="eager"), hidden), expected) <= 1e-5
    exported = torch.export.export(restore(copy.deepcopy(model)), (hidden,)).module()
    assert error(run(exported, hidden), expected) <= 1e-5


def test_nothing_of_a_call_stays() -> None:
    model = accelerate_for_cpu(Stack(Scaled(), Scaled()).eval(), dtype="float32")
    first = states(2, 7)
    outputs = [run(model, first), run(model, first), run(model, states(2, 9))]
    kept, known = outputs[1].clone(), weakref.ref(first)
    for _ in range(3):
        run(model, states(2, 7))
    assert torch.equal(outputs[1], kept)
    of_outputs = [weakref.ref(output) for output in outputs]
    del first, outputs
    assert known() is None
    assert not [ref for ref in of_outputs if ref() is not None]
    assert in_use(model)


def test_one_layer_in_many_places() -> None:
    torch.manual_seed(0)
    shared = Scaled()
    model = Stack(shared, shared, Scaled(), shared).eval()
    eager, given = copy.deepcopy(model), [states(2, 7), states(3, 5), states(2, 7)]
    accelerate_for_cpu(model, dtype="float32")
    assert len(recorded(model)) == 2
    for hidden in given:
        assert error(run(model, hidden), run(eager, hidden)) <= 1e-5


def test_an_error_in_the_middle_is_the_layers_own() -> None:
    class Careful(Written):
        def forward(self, hidden: Tensor, bias: Tensor) -> Tensor:
            if bias.shape[-1] != hidden.shape[1]:
                raise ValueError(f"a bias of {bias.shape[-1]} for {hidden.shape[1]} tokens")
            return super().forward(hidden, bias)

    model = accelerate_for_cpu(Stack(Careful(plain), Careful(plain)).eval(), dtype="float32")
    bias = torch.zeros(1, 1, 7, 7)
    for _ in range(2):
        run(model, states(2, 7), bias)
        with pytest.raises(ValueError, match="a bias of 7 for 5 tokens"):
            run(model, states(2, 5), bias)
        with pytest.raises(RuntimeError, match=r"must match|broadcast|expand"):
            run(model, states(2, 7), torch.zeros(5, 1, 7, 7))
    assert in_use(model)


def test_threads_at_once() -> None:
    torch.manual_seed(0)
    model = Stack(Scaled(), Scaled()).eval()
    given = [states(1 + n % 3, 5 + n) for n in range(16)]
    expected = [run(model, hidden) for hidden in given]
    accelerate_for_cpu(model, dtype="float32")
    errors: list[float] = []

    def serve(start: int) -> None:
        for turn in range(32):
            number = (start + turn) % len(given)
            errors.append(error(run(model, given[number]), expected[number]))

    threads = [threading.Thread(target=serve, args=(4 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 128
    assert max(errors) <= 1e-5
    assert in_use(model)


def test_weights_that_are_written_to_are_read_anew_in_joined_steps() -> None:
    torch.manual_seed(0)
    model = Stack(Written(plain), Written(plain)).eval()
    eager, hidden = copy.deepcopy(model), states(2, 7)
    accelerate_for_cpu(model, dtype="float32")
    for _ in range(2):
        run(model, hidden)
    for stack in (model, eager):
        with torch.no_grad():
            stack.layers[0].up.bias.add_(3)
            stack.layers[1].output.bias.mul_(-2)
    assert len(in_use(model)) == 2
    assert error(run(model, hidden), run(eager, hidden)) <= 1e-5
    assert explain(model).counts()["recorded layer"] == 2
