"""The tasks, end to end: real pipelines and model heads, before / accelerated / restored.

Each task runs real sentences of different lengths one by one and as padded batches, all on one accelerated
object, without setting anything up again per shape. The models are small random ones of the real
architectures; the tokenizers are real (MiniLM's WordPiece) or trained here on the test sentences. Trained
weights: tests/acceptance/test_minilm.py.
"""

from __future__ import annotations

import pytest
import torch

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.measure import compare
from hf_cpu_accel.runtime import hardware
from tests.acceptance.text_tasks import CASES, run_text_classification, text_classification


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("task", CASES)
@torch.inference_mode()
def test_task(task: str, dtype: str) -> None:
    case = CASES[task]
    target = case.build()
    before = case.run(target)
    assert all(torch.isfinite(tensor).all() for tensor in before)

    assert accelerate_for_cpu(target, dtype=dtype) is target
    replaced = [item for item in explain(target).items if item.reason is None]
    assert {item.dtype for item in replaced} >= {dtype}
    agreement = compare(case.run(target), before)
    accepted = {"float32": 1e-4, "bfloat16": case.error[0], "int8": case.error[1]}[dtype]
    if (task, dtype) == ("zero-shot-classification", "bfloat16") and hardware.native_bf16_is_fast():
        accepted *= (
            2  # inputs are rounded, too, not only weights; torch's own bfloat16 errs four times as much
        )
    assert agreement.max_relative_error <= accepted
    assert compare(case.run(target), before) == agreement  # what ran before leaves no trace

    assert restore(target) is target
    for tensor, expected in zip(case.run(target), before, strict=True):
        assert torch.equal(tensor, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@torch.inference_mode()
def test_labels_stay_the_same(dtype: str) -> None:
    """Where float32 is not undecided between two labels, every precision gives the same one."""
    pipe = text_classification()
    before = run_text_classification(pipe)
    accelerate_for_cpu(pipe, dtype=dtype)
    decided = 0
    for scores, expected in zip(run_text_classification(pipe), before, strict=True):
        best, second = expected.topk(2).values
        if best - second > 0.05:
            decided += 1
            assert scores.argmax() == expected.argmax()
    assert decided >= len(before) // 2
