"""Limits of replayed steps: the next length at which the model's code may act differently."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any

_LENGTHS = re.compile(
    "window|chunk|block|stride|period|length|len$|max|context|position|top_?k|limit|threshold|cache"
)
_REPEATED = re.compile("window|chunk|block|stride|period")
_LEAST = 8  # tokens


class Limits:
    """Lengths of texts at which steps may change: lengths in the config, such as the number of trained positions, and multiples
    of windows and chunks."""

    def __init__(self, config: Any) -> None:
        found = set(_numbers(config.to_dict(), ""))
        self._single = sorted({number for name, number in found if _LENGTHS.search(name)})
        self._repeated = sorted({number for name, number in found if _REPEATED.search(name)})

    def after(self, length: int) -> int | None:
        """Return the first limit greater than `length`, or None."""
        place = bisect_right(self._single, length)
        candidates = [(length // number + 1) * number for number in self._repeated]
        return min([*self._single[place : place + 1], *candidates], default=None)


def _numbers(value: Any, name: str) -> Iterator[tuple[str, int]]:
    """Yield the integers in a config and in its nested parts, with their names."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _numbers(part, str(key))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _numbers(part, name)
    elif type(value) is int and value >= _LEAST:
        yield name, value
