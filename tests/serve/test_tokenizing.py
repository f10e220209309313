"""`TextTokenizer`: the ids of transformers' own call, from several threads, and what it refuses or cuts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from hf_cpu_accel.serve.encoders.tokenizing import Text, TextTokenizer
from hf_cpu_accel.serve.limits import BadInput, TooLong
from tests.serve.tiny import WORDS, tokenizer

LONGEST = 8


@pytest.fixture
def texts() -> TextTokenizer:
    return TextTokenizer(tokenizer(), LONGEST)


@pytest.mark.parametrize(
    "text", ["time", "time year people way day man", ("time year", "life"), "nonsense time"]
)
def test_ids_are_those_of_transformers(texts: TextTokenizer, text: Text) -> None:
    [encoded] = texts.encode([text])
    expected = tokenizer()(*text) if isinstance(text, tuple) else tokenizer()(text)
    assert (encoded.ids, encoded.type_ids) == (expected["input_ids"], expected["token_type_ids"])


@pytest.mark.parametrize("direction", ["left", "right"])
def test_long_texts_are_rejected_or_cut(texts: TextTokenizer, direction: str) -> None:
    long = " ".join(WORDS[:10])
    with pytest.raises(TooLong, match="at most 8 tokens, given: 12"):
        texts.encode(["time", long])
    [encoded] = texts.encode([long], truncate=True, direction=direction)  # type: ignore[arg-type]
    kept = WORDS[:6] if direction == "right" else WORDS[4:10]
    assert tokenizer().decode(encoded.ids) == f"[CLS] {' '.join(kept)} [SEP]"


@pytest.mark.parametrize("direction", ["left", "right"])
def test_very_long_texts_are_not_tokenized(texts: TextTokenizer, direction: str) -> None:
    book = "time " * 10_000
    with pytest.raises(TooLong, match="at most 2000 characters, given: 50000"):
        texts.encode([book])
    [encoded] = texts.encode([book], truncate=True, direction=direction)  # type: ignore[arg-type]
    assert len(encoded.ids) == LONGEST


def test_token_ids_stay_unchanged(texts: TextTokenizer) -> None:
    first, second = texts.encode([[2, 7, 3], "time"])
    assert first.ids == [2, 7, 3]
    assert first.type_ids == [0, 0, 0]
    assert second.ids == tokenizer()("time")["input_ids"]
    assert texts.encode([list(range(12))], truncate=True)[0].ids == list(range(8))
    assert texts.encode([list(range(12))], truncate=True, direction="left")[0].ids == list(range(4, 12))
    with pytest.raises(TooLong):
        texts.encode([list(range(12))])


@pytest.mark.parametrize("wrong", ["", [], [-1], [20], ("time", "")])
def test_empty_inputs_are_rejected(texts: TextTokenizer, wrong: Text) -> None:
    with pytest.raises(BadInput):
        texts.encode(["time", wrong])


def test_threads_do_not_disturb_one_another(texts: TextTokenizer) -> None:
    long = " ".join(WORDS[:10])

    def cut(direction: str) -> list[int]:
        return texts.encode([long], truncate=True, direction=direction)[0].ids  # type: ignore[arg-type]

    expected = {direction: cut(direction) for direction in ("left", "right")}
    with ThreadPoolExecutor(4) as pool:
        directions = ["left", "right"] * 200
        assert list(pool.map(cut, directions)) == [expected[direction] for direction in directions]


def test_slow_tokenizers_are_rejected() -> None:
    with pytest.raises(ValueError, match="object is a slow tokenizer in Python"):
        TextTokenizer(object(), 8)
