"""Drafts from the text itself: what followed the last time that it ended as it does now.

Saxena 2023, "Prompt lookup decoding". Instead of n-grams of one length, the longest end of the text that occurred before is found
by a suffix automaton (Blumer et al. 1985; Hu et al. 2024, "SAM Decoding", arXiv:2411.10666), in constant time per token.
"""

from __future__ import annotations

from collections.abc import Iterable


class SuffixAutomaton:
    """All substrings of a text to which tokens are appended.

    A state stands for the substrings that end at the same positions.

    Attributes:
        text: the tokens.
        match_length: length of the longest end of the text that also occurs earlier.
        match_end: the position after that earlier occurrence; 0 without one.
    """

    def __init__(self) -> None:
        self.text: list[int] = []
        self.match_length = self.match_end = 0
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]  # the state of the longest proper suffix that also ends elsewhere
        self._length = [0]  # of the longest substring of the state
        self._end = [0]  # the position after a recent occurrence
        self._last = 0  # the state of the whole text

    def append(self, token: int) -> None:
        """Add a token to the text."""
        following, link, length, ends = self._next, self._link, self._length, self._end
        self.text.append(token)
        end = len(self.text)
        state = self._state({}, 0, end, end)
        at = self._last
        while at >= 0 and token not in following[at]:
            following[at][token] = state
            at = link[at]
        if at >= 0:
            target = following[at][token]
            if length[at] + 1 != length[target]:
                shorter = self._state(dict(following[target]), link[target], length[at] + 1, ends[target])
                while at >= 0 and following[at].get(token) == target:
                    following[at][token] = shorter
                    at = link[at]
                link[target] = target = shorter
            link[state] = target
        self._last, match = state, link[state]
        self.match_length, self.match_end = length[match], ends[match]
        if match:
            ends[match] = end

    def _state(self, following: dict[int, int], link: int, length: int, end: int) -> int:
        self._next.append(following)
        self._link.append(link)
        self._length.append(length)
        self._end.append(end)
        return len(self._next) - 1


class LookupDrafter:
    """Drafts what followed the longest end of the text that occurs in it before.

    Args:
        text: the text so far, and what else drafts may come from, before it.
    """

    is_free = True

    def __init__(self, text: Iterable[int]) -> None:
        self._automaton = SuffixAutomaton()
        for token in text:
            self._automaton.append(token)

    def append(self, token: int) -> None:
        self._automaton.append(token)

    def confidence(self) -> int:
        """Return the number of bits of the length of the match, 0 to 5."""
        return min(self._automaton.match_length.bit_length(), 5)

    def draft(self, count: int) -> list[int]:
        text, begin = self._automaton.text, self._automaton.match_end
        if not self._automaton.match_length:
            return []
        drafted = text[begin : begin + count]
        while len(drafted) < count:  # what is repeated reaches to the end of the text, and on
            drafted.append(drafted[begin + len(drafted) - len(text)])
        return drafted
