"""Layers that share keys and values in a mapping are recorded with its reads and writes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import cache_utils

from hf_cpu_accel import accelerate_for_cpu
from tests.rewrite.capture.models import Stack, Written
from tests.rewrite.capture.test_program_layer import error, in_use, plain, reasons, states

if not hasattr(cache_utils, "KVSharingDict"):
    pytest.skip("transformers.cache_utils has no KVSharingDict in this version", allow_module_level=True)


class Sharing(Written):
    """Its output goes into the dictionary; what an earlier layer has put there is added first."""

    def __init__(self, ask: Callable[[Any, Tensor], Any] = lambda shared, output: 0.0) -> None:
        super().__init__(plain)
        self.ask = ask

    def forward(self, hidden: Tensor, shared: Any) -> Tensor:  # type: ignore[override]
        output = super().forward(hidden)
        if "first" in shared:
            first, second = shared["first"]
            output = output + first + second
        shared["first"] = output * 0.5, output * 0.25
        return output + self.ask(shared, output)


def pair(*asked: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Stack(Sharing(*asked), Sharing(*asked)).eval()
    eager = copy.deepcopy(model)
    return accelerate_for_cpu(model, dtype="float32"), eager


def run(model: nn.Module, hidden: Tensor, given: dict[str, Any] | None = None) -> tuple[Tensor, Any]:
    shared = cache_utils.KVSharingDict(given or {})
    with torch.no_grad():
        return model(hidden, shared), shared


def differ(model: Any, eager: Any, hidden: Tensor, given: dict[str, Any] | None = None) -> float:
    (ours, our_states), (theirs, their_states) = (run(tried, hidden, given) for tried in (model, eager))
    assert list(our_states) == list(their_states)
    errors = [error(ours, theirs)]
    for name in their_states:
        errors += map(error, our_states[name], their_states[name])
    return max(errors)


def test_what_is_shared_is_what_the_layers_share() -> None:
    model, eager = pair()
    for batch, length in ((2, 7), (2, 7), (1, 7), (2, 9), (3, 1), (2, 7)):
        assert differ(model, eager, states(batch, length)) <= 1e-5
    assert len(in_use(model)) == 2  # the second layer is called with another dictionary than the first
    given = {"first": (torch.ones(2, 1, 64), torch.ones(2, 7, 64))}
    for _ in range(2):
        assert differ(model, eager, states(2, 7), given) <= 1e-5


def test_a_branch_behind_what_is_shared_leaves_it_as_it_was() -> None:
    def branch(shared: Any, output: Tensor) -> Any:
        return 1.0 if output[0, 0, 0] > 0 else 0.0

    model, eager = pair(branch)
    for number in range(12):
        hidden = torch.randn(2, 7, 64, generator=torch.Generator().manual_seed(number))
        assert differ(model, eager, hidden) <= 1e-5
    assert any(program.unfit for program in in_use(model))


@pytest.mark.parametrize(
    ("ask", "reason"),
    [
        (lambda shared, _: len(shared), "it uses len"),
        (lambda shared, _: sum(1 for _ in shared), "it uses iter"),
        (lambda shared, _: shared.to("cpu")["first"][0], "it uses to"),
        (lambda shared, _: shared["first"][0].add_(1.0), None),
    ],
    ids=["len", "iter", "to", "written"],
)
def test_what_else_is_done_with_them(ask: Any, reason: str | None) -> None:
    model, eager = pair(ask)
    for _ in range(3):
        assert differ(model, eager, states(2, 7)) <= 1e-5
    if reason is None:  # a layer may write to what it has made itself
        return
    assert not in_use(model)
    assert all(reason in str(said) for said in reasons(model)), reasons(model)


def test_what_an_earlier_layer_has_made_is_not_written_to() -> None:
    class Writing(Sharing):
        def forward(self, hidden: Tensor, shared: Any) -> Tensor:  # type: ignore[override]
            if "first" in shared:
                shared["first"][0].mul_(2.0)
            return super().forward(hidden, shared)

    torch.manual_seed(0)
    model = Stack(Writing(), Writing()).eval()
    eager = copy.deepcopy(model)
    accelerate_for_cpu(model, dtype="float32")
    for _ in range(3):
        assert differ(model, eager, states(2, 7)) <= 1e-5
    assert {str(said) for said in reasons(model)} == {"it writes to its arguments or its weights"}


def test_other_things_in_the_dictionary_go_to_its_own_forward() -> None:
    model, eager = pair()
    hidden = states(2, 7)
    for _ in range(2):
        assert error(run(model, hidden, {"more": 3})[0], run(eager, hidden, {"more": 3})[0]) <= 1e-5
    assert any("['more']" in str(said) for said in reasons(model))
