"""The Space `semantic-search` without its page: real MiniLM."""

import pytest

from hf_cpu_accel import explain
from hf_cpu_accel.serve.comparison import Pair
from tests.spaces.folders import module_of

search = module_of("semantic-search", "search")


@pytest.fixture(scope="module")
def pair():
    return Pair(search.load(), dtype="float32")


@pytest.mark.parametrize(
    ("query", "word"),
    [
        ("How do I repair a punctured wheel?", "tyre"),
        ("medicine for a high temperature", "fever"),
        ("when do I get my money back?", "Refunds"),
    ],
)
def test_finds_passages_by_meaning(pair, query, word):
    matches = search.search(pair, query, search.PASSAGES)
    assert len(matches) == search.SHOWN
    assert any(word in match.passage for match in matches[:2])
    scores = [match.accelerated for match in matches]
    assert scores == sorted(scores, reverse=True)
    assert all(abs(match.eager - match.accelerated) < 1e-4 for match in matches)


def test_measures_all_passages(pair):
    comparison = search.measure(pair, search.PASSAGES[:3])
    assert (comparison.amount, comparison.unit) == (3, "passages")
    assert explain(pair.accelerated).replaced
    assert not explain(pair.eager).items


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n \n", "There are 0 passages; enter 1 to 200"),
        ("a\n" * 201, "There are 201 passages"),
        ("a\n" + 301 * "b", "Passage 2 has 301 characters; the limit is 300"),
    ],
)
def test_invalid_passages_are_rejected(text, message):
    with pytest.raises(ValueError, match=message):
        search.passages_of(text)


@pytest.mark.parametrize(
    ("text", "message"), [(" \n", "The query is empty"), (301 * "a", "has 301 characters")]
)
def test_invalid_queries_are_rejected(text, message):
    with pytest.raises(ValueError, match=message):
        search.query_of(text)


def test_accepts_texts_at_the_limits():
    assert search.query_of(f" {300 * 'a'} ") == 300 * "a"
    assert search.passages_of(f"{300 * 'a'}\n\n b \n" + "c\n" * 198)[:2] == [300 * "a", "b"]
    assert search.passages_of("\n".join(search.PASSAGES)) == search.PASSAGES
