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
def test_finds_what_is_meant(pair, query, word):
    found = search.search(pair, query, search.PASSAGES)
    assert len(found) == search.SHOWN
    assert any(word in row.passage for row in found[:2])
    assert [row.accelerated for row in found] == sorted((row.accelerated for row in found), reverse=True)
    assert all(abs(row.eager - row.accelerated) < 1e-4 for row in found)


def test_measures_all_passages(pair):
    comparison = search.measure(pair, search.PASSAGES[:3])
    assert (comparison.amount, comparison.unit) == (3, "passages")
    assert explain(pair.accelerated).replaced
    assert not explain(pair.eager).items


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n \n", "There are 0 passages; write 1 to 200"),
        ("a\n" * 201, "There are 201 passages"),
        ("a\n" + 301 * "b", "Passage 2 has 301 letters; up to 300"),
    ],
)
def test_refuses_passages(text, message):
    with pytest.raises(ValueError, match=message):
        search.passages_of(text)


@pytest.mark.parametrize(
    ("text", "message"), [(" \n", "Write what you are looking for"), (301 * "a", "has 301 letters")]
)
def test_refuses_queries(text, message):
    with pytest.raises(ValueError, match=message):
        search.checked_query(text)


def test_takes_what_is_just_allowed():
    assert search.checked_query(f" {300 * 'a'} ") == 300 * "a"
    assert search.passages_of(f"{300 * 'a'}\n\n b \n" + "c\n" * 198)[:2] == [300 * "a", "b"]
    assert search.passages_of("\n".join(search.PASSAGES)) == search.PASSAGES
