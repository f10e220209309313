"""In-place processors, and the choice of the largest scores, agree with transformers and torch."""

from __future__ import annotations

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from hf_cpu_accel.generate.processors import in_place
from hf_cpu_accel.generate.topk import largest

PROCESSORS = {
    "min length": MinLengthLogitsProcessor(12, [1, 5]),
    "min length, reached": MinLengthLogitsProcessor(6, [1]),
    "end beyond the vocabulary": MinLengthLogitsProcessor(12, [1, 500, -1]),
    "new tokens": MinNewTokensLengthLogitsProcessor(5, 7, 3),
    "new tokens, reached": MinNewTokensLengthLogitsProcessor(5, 2, 3),
    "suppressed": SuppressTokensLogitsProcessor([0, 7, 99]),
    "suppressed at the begin": SuppressTokensAtBeginLogitsProcessor([0, 7, 99], 2),
    **{f"{size}-grams": NoRepeatNGramLogitsProcessor(size) for size in (1, 2, 3, 20)},
}


@pytest.mark.parametrize("processor", PROCESSORS.values(), ids=PROCESSORS)
def test_in_place(processor) -> None:
    generator = torch.Generator().manual_seed(0)
    for length in (1, 2, 10):
        ids = torch.randint(0, 6, (4, length), generator=generator)
        scores = torch.randn(4, 50, generator=generator)
        expected = processor(ids, scores.clone())
        given = scores.clone()
        output = in_place(LogitsProcessorList([processor]))(ids, given)
        assert torch.equal(output, expected)
        assert output is given


def test_others_stay_in_their_order() -> None:
    processors = LogitsProcessorList(
        [
            NoRepeatNGramLogitsProcessor(1),
            RepetitionPenaltyLogitsProcessor(1.5),
            MinLengthLogitsProcessor(9, 3),
        ]
    )
    ids, scores = torch.tensor([[4, 5, 6], [6, 5, 4]]), torch.randn(2, 20)
    expected = processors(ids, scores.clone())
    assert torch.equal(in_place(processors)(ids, scores.clone()), expected)


@pytest.mark.parametrize("n", [5, 100, 640, 2047, 4096, 20001])
def test_largest(n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    random = torch.randn(3, n, generator=generator)
    forced = torch.full((3, n), -torch.inf)
    forced[:, n // 2] = -1.0
    missing = random.clone()
    missing[1, 3] = torch.nan
    for scores in (random, random.round(), forced, -random.abs().sort(dim=1).values, missing):
        for count in (1, 4, min(n, 12)):
            values, places = largest(scores, min(count, n))
            expected = torch.topk(scores, min(count, n))
            assert torch.equal(values.nan_to_num(), expected.values.nan_to_num())
            assert torch.equal(places, expected.indices)
