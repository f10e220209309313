"""Table of paths and patterns with the dtypes of modules that differ from the rest."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from hf_cpu_accel.packing.linear import FORMS

_WILD = frozenset("*?[")


class DtypeTable:
    """Dtypes of modules by path or pattern.

    Args:
        pairs: (path or shell-style pattern, dtype). Each applies to the modules that match it and to all modules below them. If
            several match, the last one wins.
    """

    def __init__(self, pairs: Iterable[tuple[str, str]]) -> None:
        self._pairs = tuple(pairs)
        entries = [(pattern, (place, dtype)) for place, (pattern, dtype) in enumerate(self._pairs)]
        # Of paths there may be one for each layer, of patterns there are a few.
        self._paths = {path: entry for path, entry in entries if not _WILD & set(path)}
        self._patterns = [(pattern, entry) for pattern, entry in entries if _WILD & set(pattern)]

    def followed_by(self, pairs: Iterable[tuple[str, str]]) -> DtypeTable:
        """Return a table with further pairs at the end."""
        return DtypeTable((*self._pairs, *pairs))

    def of(self, path: str) -> str | None:
        """Return the dtype of the module at `path`, or None if no pair matches."""
        if not self._paths and not self._patterns:
            return None
        prefixes = prefixes_of(path)
        found = [self._paths[prefix] for prefix in prefixes if prefix in self._paths]
        found += [entry for p, entry in self._patterns if any(fnmatchcase(prefix, p) for prefix in prefixes)]
        return max(found)[1] if found else None


def prefixes_of(path: str) -> list[str]:
    """Return `path` and the paths of the modules above it, without the root: "a", "a.b" and "a.b.c" for "a.b.c"."""
    parts = [part for part in path.split(".") if part]
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]


def coarsest(dtypes: Iterable[str]) -> str:
    """Return the dtype that rounds most, or "float32" without any."""
    return max(dtypes, key=FORMS.index, default="float32")
