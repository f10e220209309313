"""`accelerate_for_cpu(model, dtype="int4", calibration=...)`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModel

from hf_cpu_accel import accelerate_for_cpu, accelerated, explain, restore
from hf_cpu_accel.lifecycle import on_originals
from hf_cpu_accel.rewrite.calibration import stage
from tests.packing.test_affine import random_groups
from tests.rewrite.calibration.models import answer, calls, ids, model

FAMILIES = ("llama", "bert", "gpt2")


def error(given: Tensor, expected: Tensor) -> float:
    return ((given - expected).norm() / expected.norm()).item()


def state(of: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in of.state_dict().items()}


def assert_untouched(given: Any, before: dict[str, Tensor], outputs: Tensor) -> None:
    assert all(torch.equal(tensor, before[name]) for name, tensor in given.state_dict().items())
    assert not any("forward" in vars(module) for module in given.modules())
    assert torch.equal(answer(given), outputs)


@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_that_it_was_not_calibrated_on_are_nearer(family: str, group: int) -> None:
    given = model(family)
    before, expected = state(given), answer(given)
    errors = []
    for calibration in (None, calls()):
        accelerate_for_cpu(given, dtype="int4", int4_group=group, calibration=calibration)
        errors.append(error(answer(given), expected))
        restore(given)
    assert errors[1] < 0.85 * errors[0]
    assert_untouched(given, before, expected)


def test_two_runs_are_one() -> None:
    given, outputs = model("llama"), []
    for _ in range(2):
        accelerate_for_cpu(given, dtype="int4", calibration=calls())
        outputs.append(answer(given))
        restore(given)
    assert torch.equal(*outputs)


def test_a_calibrated_model_is_saved_as_it_is(tmp_path: Path) -> None:
    given = accelerate_for_cpu(model("bert"), dtype="int4", calibration=calls())
    expected = answer(given)
    given.save_pretrained(tmp_path, packed=True)
    assert torch.equal(answer(AutoModel.from_pretrained(tmp_path, add_pooling_layer=False)), expected)


def test_weights_of_a_grid_keep_it() -> None:
    given = model("llama")
    with torch.no_grad():
        for path, parameter in given.named_parameters():
            if "proj" in path:
                parameter.copy_(random_groups(*parameter.shape, 4, 32).dequantize() / 8)
    expected = answer(given)
    accelerate_for_cpu(given, dtype="int4", calibration=calls())
    assert {item.dtype for item in explain(given).items if "proj" in item.name} == {"affine4"}
    assert error(answer(given), expected) < 1e-3


def test_the_plan_says_on_what_and_who_was_not_reached() -> None:
    given = model("bert")
    given.extra = nn.ModuleList([nn.Sequential(nn.Linear(64, 64))]).eval()
    accelerate_for_cpu(given, dtype="int4", calibration=calls())
    note = next(note for note in explain(given).notes if "calibrated" in note)
    assert note.startswith("calibrated on 512 rows: 12 of 13 int4 linears")
    assert "no example reached extra.0.0" in note


def test_padding_is_not_looked_at() -> None:
    """Any values at padding: the rows of tokens are the same, and so are the rounded weights."""
    outputs = []
    for filling in (0, 7):
        batch = {"input_ids": ids(0), "attention_mask": torch.ones(4, 32, dtype=torch.long)}
        batch["input_ids"][:, 20:], batch["attention_mask"][:, 20:] = filling, 0
        given = accelerate_for_cpu(model("llama"), dtype="int4", calibration=[batch])
        assert any("calibrated on 80 rows" in note for note in explain(given).notes)
        outputs.append(answer(given))
    assert error(*outputs) < 1e-4


def test_inputs_that_are_like_no_example_are_not_given_up() -> None:
    """One row, over and over: rounded for that alone, weights would be anything."""
    given = model("llama")
    expected = answer(given)
    same = {"input_ids": torch.full((4, 32), 3)}
    accelerate_for_cpu(given, dtype="int4")
    plain = error(answer(given), expected)
    restore(given)
    accelerate_for_cpu(given, dtype="int4", calibration=[same])
    assert all(item.reason is None for item in explain(given).items if "proj" in item.name)
    assert error(answer(given), expected) < 2 * plain


def test_accelerated_anew_it_is_calibrated_again() -> None:
    given = accelerate_for_cpu(model("llama"), dtype="int4", calibration=calls())
    expected = answer(given)
    with on_originals([given]):
        assert explain(given).dtype == "none"
    assert torch.equal(answer(given), expected)
    with accelerated(given, dtype="int8"):
        assert explain(given).dtype == "int8"
    assert torch.equal(answer(given), expected)
    accelerate_for_cpu(given, dtype="int4")  # as it is already
    assert torch.equal(answer(given), expected)
    accelerate_for_cpu(given, dtype="int4", calibration=calls(1))  # that is another one
    assert not torch.equal(answer(given), expected)


def test_float16_weights() -> None:
    given = model("bert").to(torch.float16)
    before = state(given)
    accelerate_for_cpu(given, dtype="int4", calibration=calls(1))
    assert any("12 of 12 int4 linears" in note for note in explain(given).notes)
    restore(given)
    assert all(torch.equal(tensor, before[name]) for name, tensor in given.state_dict().items())


@pytest.mark.parametrize("fails", ["second batch", "rounding"])
def test_whatever_is_raised_leaves_the_model(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    given = model("llama")
    before, expected = state(given), answer(given)
    calibration: list[dict[str, Any]] = calls(2)
    if fails == "second batch":
        calibration[1] = {"input_ids": torch.full((1, 4), 10**6)}
    else:
        monkeypatch.setattr(stage, "pack_rounded", lambda *args: (_ for _ in ()).throw(RuntimeError("full")))
    with pytest.raises((ValueError, RuntimeError), match=r"raised an error for batch 1: IndexError|full"):
        accelerate_for_cpu(given, dtype="int4", calibration=calibration)
    assert_untouched(given, before, expected)
