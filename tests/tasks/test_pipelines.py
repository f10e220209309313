"""Every pipeline task of transformers: accelerated it answers as before, and fails as before."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.pipelines import SUPPORTED_TASKS

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from tests.tasks.all import CASES, task_of
from tests.tasks.case import Call

_PIXELS = 1.0  # of 255: images are rounded after they are computed


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # tiny models: a fork of threads takes longer than what it computes


def test_every_task_of_transformers_is_here() -> None:
    assert {task_of(name) for name in CASES} == set(SUPPORTED_TASKS)


@pytest.mark.parametrize("name", CASES)
def test_answers(name: str) -> None:
    case = CASES[name]
    pipe = case.build()
    before = [outcome(pipe, call) for call in case.calls]
    assert not any(isinstance(answer, Exception) for answer in before), before

    assert accelerate_for_cpu(pipe, dtype="float32") is pipe
    assert explain(pipe).replaced
    for _ in range(2):  # what ran before leaves no trace
        for call, expected in zip(case.calls, before, strict=True):
            check(outcome(pipe, call), expected)

    assert restore(pipe) is pipe
    for call, expected in zip(case.calls, before, strict=True):
        check(outcome(pipe, call), expected, tolerance=0.0)


@pytest.mark.filterwarnings(
    "ignore::RuntimeWarning"
)  # of numpy, about no sound at all and depths that are all alike
@pytest.mark.parametrize("name", CASES)
def test_bad_input(name: str) -> None:
    case = CASES[name]
    pipe = case.build()
    before = {what: outcome(pipe, call) for what, call in case.bad.items()}
    accelerate_for_cpu(pipe, dtype="float32")
    for what, call in case.bad.items():
        check(outcome(pipe, call), before[what], what)
    for call in case.calls:  # and nothing is left of what went wrong
        assert not isinstance(outcome(pipe, call), Exception)


def outcome(pipe: Any, call: Call) -> Any:
    """The answer, or the exception."""
    args, options = copy.deepcopy(call)  # some pipelines take what they are given apart
    torch.manual_seed(0)
    try:
        return pipe(*args, **options)
    except Exception as error:
        return error


def check(given: Any, expected: Any, where: str = "", tolerance: float = 2e-4) -> None:
    """The same structure with the same values, numbers within `tolerance` of the largest of their array or 1."""
    if isinstance(expected, Exception):
        assert type(given) is type(expected), (where, given, expected)
    elif isinstance(expected, dict):
        assert isinstance(given, dict), (where, given)
        assert given.keys() == expected.keys(), where
        for key in expected:
            check(given[key], expected[key], f"{where}.{key}", tolerance)
    elif isinstance(expected, list | tuple):
        assert len(given) == len(expected), where
        for place, (one, other) in enumerate(zip(given, expected, strict=True)):
            check(one, other, f"{where}[{place}]", tolerance)
    elif isinstance(expected, Image.Image):
        assert given.mode == expected.mode, where
        difference = np.asarray(given, dtype=float) - np.asarray(expected, dtype=float)
        assert np.abs(difference).max(initial=0) <= (_PIXELS if tolerance else 0), where
    elif isinstance(expected, float | np.ndarray | np.floating | torch.Tensor):
        values, reference = (torch.as_tensor(value).double() for value in (given, expected))
        assert values.shape == reference.shape, where
        scale = max(1.0, reference.nan_to_num().abs().max().item()) if reference.numel() else 1.0
        assert torch.allclose(values, reference, rtol=0, atol=tolerance * scale, equal_nan=True), where
    else:
        assert given == expected, where
