"""What is not fused where it could be expected says why, and errors of our own are not taken for that."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from encoder_families import bert, inputs, run
from torch import Tensor, nn

from hf_cpu_accel import accelerate_for_cpu, explain
from hf_cpu_accel.rewrite import encoder_layer, encoder_reading
from hf_cpu_accel.rewrite.foreign import STRICT, OwnError, attempt, call_foreign, ours
from hf_cpu_accel.rewrite.refusal import Refusal, Refused


def reasons(model: nn.Module, structure: str) -> dict[str, str | None]:
    return {item.name: item.reason for item in explain(model).left if item.structure == structure}


def broken(*args: Any, **kwargs: Any) -> Any:
    raise KeyError("planted")


def test_whatever_foreign_code_raises_is_a_refusal_that_names_it() -> None:
    def forward(x: Tensor) -> Tensor:
        raise ValueError("three heads\nor four")

    assert call_foreign(len, "four") == 4
    refusal = call_foreign(forward, torch.ones(1))
    assert isinstance(refusal, Refusal)
    assert refusal.reason.endswith("forward raised ValueError: three heads")
    assert call_foreign(nn.Linear(2, 2), "text").reason.startswith("Linear raised TypeError")
    assert call_foreign(nn.Linear(2, 2).forward, "text").reason.startswith("Linear raised TypeError")


def test_errors_of_our_own_beneath_foreign_code_go_through_it() -> None:
    def theirs() -> None:
        try:
            with ours():
                raise IndexError("planted")
        except Exception:  # what hosts do
            return

    with pytest.raises(OwnError):
        call_foreign(theirs)
    with pytest.raises(IndexError, match="planted"):
        attempt("layers.0", theirs)


def test_no_memory_is_no_refusal() -> None:
    def greedy() -> None:
        raise MemoryError

    for caller in (call_foreign, lambda function: attempt("layers.0", function)):
        with pytest.raises(MemoryError):
            caller(greedy)


def test_a_reading_ends_with_the_refusal_that_it_raises() -> None:
    def look() -> int:
        raise Refused(Refusal("no norms"))

    assert attempt("layers.0", look) == Refusal("no norms")


# An error of our own, planted in each fuser: where, and the model that meets it.
PLANTED = {
    "encoder layer": (encoder_reading, "guesses", bert),
}


@pytest.mark.parametrize("structure", PLANTED)
def test_an_error_of_ours_raises_under_strict(structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, build = PLANTED[structure]
    monkeypatch.setattr(module, name, broken)
    model = build()
    batch = inputs(model)
    before = run(model, batch)
    with pytest.raises(KeyError, match="planted"):
        accelerate_for_cpu(model, dtype="float32")
    assert torch.equal(run(model, batch), before)


@pytest.mark.parametrize("structure", PLANTED)
def test_else_it_is_logged_and_the_part_left(
    structure: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module, name, build = PLANTED[structure]
    monkeypatch.setattr(module, name, broken)
    monkeypatch.delenv(STRICT)
    model = build()
    batch = inputs(model)
    before = run(model, batch)
    with caplog.at_level(logging.WARNING, "hf_cpu_accel"):
        accelerate_for_cpu(model, dtype="float32")
    torch.testing.assert_close(run(model, batch), before, rtol=1e-4, atol=1e-5)
    left = reasons(model, structure)
    assert left
    assert set(left.values()) == {"an error of hf_cpu_accel, which was logged: KeyError"}
    logged = [record.getMessage() for record in caplog.records]
    assert all(sum(f"'{path}'" in message for message in logged) == 1 for path in left)
    assert not [item for item in explain(model).replaced if item.structure == structure]


def refusing(model: nn.Module, obstacle: str) -> nn.Module:
    """With one layer that no fused one stands for."""
    layer = model.encoder.layer[1]
    if obstacle == "parameter":
        layer.intermediate.register_parameter("temperature", nn.Parameter(torch.ones(64, 64)))
    elif obstacle == "hook":
        layer.attention.self.register_forward_hook(lambda module, args, output: None)
    elif obstacle == "forward":
        own = layer.attention.forward
        layer.attention.forward = lambda *args, **kwargs: own(*args, **kwargs)
    elif obstacle == "buffer":
        layer.register_buffer("steps", torch.zeros(1))
    return model


@pytest.mark.parametrize(
    ("obstacle", "reason"),
    [
        ("parameter", "temperature belongs to no linear and no norm"),
        ("hook", "there are hooks on modules in it"),
        ("forward", "was replaced or compiled"),
        ("buffer", "it holds buffers"),
    ],
)
def test_an_encoder_layer_says_why_it_is_left(obstacle: str, reason: str) -> None:
    model = accelerate_for_cpu(refusing(bert(), obstacle), dtype="float32")
    left = reasons(model, encoder_layer.STRUCTURE)
    assert list(left) == ["encoder.layer.1"]
    assert reason in str(left["encoder.layer.1"])


def test_a_layer_that_raises_says_what() -> None:
    class Picky(type(bert().encoder.layer[0])):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            if hidden_states.shape[0] == 2:
                raise ValueError("an even batch")
            return super().forward(hidden_states, *args, **kwargs)

    model = bert()
    model.encoder.layer[0].__class__ = Picky
    accelerate_for_cpu(model, dtype="float32")
    assert reasons(model, encoder_layer.STRUCTURE) == {
        "encoder.layer.0": "Picky raised ValueError: an even batch"
    }
    assert "an even batch" in str(explain(model))


def test_what_is_fused_gives_no_such_row() -> None:
    model = accelerate_for_cpu(bert(), dtype="float32")
    assert not reasons(model, encoder_layer.STRUCTURE)
