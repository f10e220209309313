"""Which dtype modules are packed in where it is not the same for all: a table of paths and patterns."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from hf_cpu_accel.packing.linear import FORMS

_WILD = frozenset("*?[")


class DtypeTable:
    """
    Args:
        pairs: (path or shell-style pattern, dtype). Each stands for the modules that match it and all that is below them; where
            several do, the last one decides.
    """

    def __init__(self, pairs: Iterable[tuple[str, str]]) -> None:
        self._pairs = tuple(pairs)
        entries = [(pattern, (place, dtype)) for place, (pattern, dtype) in enumerate(self._pairs)]
        # Of paths there may be one for each layer, of patterns there are a few.
        self._paths = {path: entry for path, entry in entries if not _WILD & set(path)}
        self._patterns = [(pattern, entry) for pattern, entry in entries if _WILD & set(pattern)]

    def followed_by(self, pairs: Iterable[tuple[str, str]]) -> DtypeTable:
        """The same with further pairs, which come last."""
        return DtypeTable((*self._pairs, *pairs))

    def of(self, path: str) -> str | None:
        """The dtype of the module at `path`; None if nothing stands for it."""
        if not self._paths and not self._patterns:
            return None
        prefixes = prefixes_of(path)
        found = [self._paths[prefix] for prefix in prefixes if prefix in self._paths]
        found += [entry for p, entry in self._patterns if any(fnmatchcase(prefix, p) for prefix in prefixes)]
        return max(found)[1] if found else None


def prefixes_of(path: str) -> list[str]:
    """`path` and the paths of the modules above it, but for the root's: "a.b.c" gives "a", "a.b" and "a.b.c"."""
    parts = [part for part in path.split(".") if part]
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]


def coarsest(dtypes: Iterable[str]) -> str:
    """The one that rounds most of these, none of them being float32's."""
    return max(dtypes, key=FORMS.index, default="float32")
