"""The argument `calibration`."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import pipeline

from hf_cpu_accel import accelerate_for_cpu, explain
from hf_cpu_accel.rewrite.core.calibration import calibration_examples
from tests.acceptance.tokenizers import byte_bpe, wordpiece
from tests.rewrite.calibration.models import calls, model

TEXTS = ["one", "a longer text of several words", "and " * 900]


def test_texts_are_cut_and_stand_side_by_side() -> None:
    given = calibration_examples(TEXTS, model("bert"), wordpiece())
    assert {name for example in given for name in example.kwargs} == {
        "input_ids",
        "attention_mask",
        "token_type_ids",
    }
    lengths = [length for example in given for length in example.kwargs["attention_mask"].sum(1).tolist()]
    assert sorted(lengths) == [3, 8, 392, 512]  # two windows of 510 and 390 words, each with its ends
    assert all(example.kwargs["input_ids"].shape[1] <= 512 for example in given)
    many = calibration_examples(["a b c"] * 40, model("bert"), wordpiece())
    assert [len(example.kwargs["input_ids"]) for example in many] == [5] * 8


def test_padding_has_no_rows() -> None:
    (example,) = calibration_examples(
        [{"input_ids": torch.ones(2, 3), "attention_mask": torch.tensor([[1, 1, 0], [1, 0, 0]])}],
        model("bert"),
    )
    assert example.rows(torch.randn(2, 3, 8)).shape == (3, 8)
    assert example.rows(torch.randn(2, 5, 8)).shape == (10, 8)  # not by tokens


def test_data_loaders_and_tensors() -> None:
    loader: Any = DataLoader([batch["input_ids"][0] for batch in calls()], batch_size=2)
    given = accelerate_for_cpu(model("llama"), dtype="int4", calibration=loader)
    assert any("calibrated on 128 rows" in note for note in explain(given).notes)
    plain = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3))).eval()
    accelerate_for_cpu(plain, dtype="int4", calibration=[torch.randn(10, 32)])
    assert any("calibrated on 10 rows" in note for note in explain(plain).notes)


class Features(nn.Module):
    """As modules of a SentenceTransformer: takes a mapping, and writes into it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        for layer in self.layers:
            features["x"] = torch.tanh(layer(features["x"]))
        return features


def test_a_sequential_takes_one_mapping() -> None:
    rows = torch.randn(7, 32)
    given = {"x": rows}
    model = nn.Sequential(Features()).eval()
    accelerate_for_cpu(model, dtype="int4", calibration=[given])
    assert any("calibrated on 7 rows: 2 of 2" in note for note in explain(model).notes)
    assert given["x"] is rows


def test_a_pipeline_has_its_tokenizer() -> None:
    bert = model("bert")
    bert.resize_token_embeddings(len(wordpiece()))
    pipe = pipeline("feature-extraction", model=bert, tokenizer=wordpiece())
    accelerate_for_cpu(pipe, dtype="int4", calibration=["some words", "some more words"])
    assert any("calibrated on 9 rows" in note for note in explain(pipe).notes)


@pytest.mark.parametrize(
    ("calibration", "error", "says"),
    [
        ("a text", TypeError, "calibration of type str is not supported; pass a list of texts"),
        (3, TypeError, "calibration of type int"),
        ([], ValueError, "calibration is empty"),
        ([3], TypeError, "calibration has an item of type int"),
        (["a text", 3], TypeError, "calibration has an item of type str"),
        (({"input_ids": number} for number in count()), ValueError, "more than 64 batches"),
        (["a text"], ValueError, "no tokenizer: pass tokenizer="),
        ([{"no_such": torch.ones(1)}], ValueError, "raised an error for batch 0: ValueError"),
    ],
)
def test_what_cannot_be_is_said(calibration: Any, error: type[Exception], says: str) -> None:
    given = model("llama")
    with pytest.raises(error, match=says):
        accelerate_for_cpu(given, dtype="int4", calibration=calibration)
    assert explain(given).dtype == "none"


def test_other_dtypes_are_not_calibrated() -> None:
    with pytest.raises(ValueError, match="dtype='int8': use dtype='int4'"):
        accelerate_for_cpu(model("llama"), dtype="int8", calibration=calls())


def test_a_given_tokenizer_is_taken() -> None:
    llama = model("llama")
    llama.resize_token_embeddings(len(byte_bpe()))
    accelerate_for_cpu(llama, dtype="int4", calibration=TEXTS[:2], tokenizer=byte_bpe())
    assert any("calibrated on" in note for note in explain(llama).notes)
