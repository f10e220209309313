"""The longest end of a text that occurs earlier, against a search through all ends."""

import random

import pytest

from hf_cpu_accel.generate.speculation.lookup import LookupDrafter, SuffixAutomaton


def longest_repeated_end(text):
    """Return the length of the longest end of `text` that also ends earlier, by comparing all pairs."""
    for length in range(len(text) - 1, 0, -1):
        end = text[-length:]
        if any(text[at - length : at] == end for at in range(length, len(text))):
            return length
    return 0


@pytest.mark.parametrize("vocabulary", [1, 2, 3, 12])
@pytest.mark.parametrize("seed", range(4))
def test_matches_are_the_longest_and_occur_earlier(vocabulary, seed):
    draw, automaton = random.Random(seed), SuffixAutomaton()
    for _ in range(60):
        automaton.append(draw.randrange(vocabulary))
        text, length, end = automaton.text, automaton.match_length, automaton.match_end
        assert length == longest_repeated_end(text)
        if length:
            assert end < len(text)
            assert text[end - length : end] == text[len(text) - length :]


def test_the_latest_of_equal_matches_counts():
    automaton = SuffixAutomaton()
    for token in (1, 2, 9, 1, 2, 8, 1, 2):
        automaton.append(token)
    assert automaton.text[automaton.match_end] == 8


def test_drafts_are_what_followed():
    drafter = LookupDrafter([5, 6, 7, 8, 9, 5, 6])
    assert drafter.draft(3) == [7, 8, 9]
    drafter.append(3)
    assert drafter.confidence() == 0
    assert drafter.draft(3) == []


def test_drafts_go_on_with_what_repeats():
    assert LookupDrafter([9, 1, 2, 1, 2]).draft(7) == [1, 2, 1, 2, 1, 2, 1]
    assert LookupDrafter([4, 4]).draft(3) == [4, 4, 4]


def test_longer_matches_have_more_confidence():
    text = list(range(3, 40))
    drafter, seen = LookupDrafter(text), []
    for token in text:
        drafter.append(token)
        seen.append(drafter.confidence())
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (1, 5)


def test_a_long_text_is_read_in_linear_time():
    """40,000 tokens of the worst kind for a search by pairs, which would take hours."""
    drafter = LookupDrafter([1, 2] * 20_000)
    assert drafter.draft(2) == [1, 2]
