"""Fixtures that count the layers of each call of the decoder op, and that switch off recorded layers."""

from typing import Any

import pytest

from hf_cpu_accel.generate.replay.program import Program, Step
from hf_cpu_accel.rewrite import apply
from hf_cpu_accel.rewrite.decoder import deferred


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many layers each call of `decoder_layers` ran, in order, replayed too; without the comparison of first calls."""
    stages = tuple(stage for stage in apply.STAGES if stage.name != "first calls")
    monkeypatch.setattr(apply, "STAGES", stages)
    calls: list[int] = []
    op = deferred._DECODER_LAYERS

    def counted(*args: Any) -> Any:
        calls.append(len(args[3]))  # the layout
        return op(*args)

    take = Step.take

    def counted_step(self: Step, known: Any, step: int) -> bool:
        if self.func is op:
            calls.append(len(self.args[3].value(known, step)))
        return take(self, known, step)

    monkeypatch.setattr(deferred, "_DECODER_LAYERS", counted)
    run = Program.run

    def run_for_good(self: Program, inputs: Any, step: int, *, keeps: bool = True) -> Any:
        before = len(calls)
        logits = run(self, inputs, step, keeps=keeps)
        if not keeps:  # a trial, beside which the model is called
            del calls[before:]
        return logits

    monkeypatch.setattr(Step, "take", counted_step)
    monkeypatch.setattr(Program, "run", run_for_good)
    return calls


@pytest.fixture
def nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that the other stages refuse are left."""
    stages = tuple(stage for stage in apply.STAGES if stage.name != "recorded layers")
    monkeypatch.setattr(apply, "STAGES", stages)
