"""The rows of a plan as lines of text.

Modules that differ only in the numbers of their paths are one row, as `encoder.layer.*.output x2 | linear | linear | float32`.
Rows that differ only in their paths are one line, in which modules of one parent share its path:
`encoder.layer.*.attention.{key,query} x2, pooler | linear | linear | float32`.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping

from hf_cpu_accel.plan import Plan

Row = tuple[str, str, str, str, str | None]
"""Pattern of the path, structure, op, dtype, and the reason why it was left or None."""

Rows = list[tuple[Row, int]]
"""Rows of one plan, each with the number of its modules."""

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_ROOT = "(the model)"
_PATH = re.compile(r"(?P<parent>(?:[^{},]*\.)?)(?:\{(?P<names>[^{}]*)\})(?P<count> x\d+)?")


def rows_of(plan: Plan) -> Rows:
    """Return the rows of a plan, sorted."""
    counts = Counter(
        (_NUMBER.sub("*", item.name), item.structure, item.op, item.dtype, item.reason) for item in plan.items
    )
    return sorted(counts.items(), key=lambda pair: str(pair[0]))


def lines(plans: Mapping[str, Rows]) -> list[str]:
    """Return the rows of one model in several dtypes as lines, sorted.

    A row that all plans share has the dtype of each, as in `float32/int8`. Other rows begin with the dtype of their model.
    """
    paths: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
    for setting, path, count, outcome in _rows(plans):
        paths[setting, outcome].append((path or _ROOT, f" x{count}" if count > 1 else ""))
    texts = [
        (", ".join(_siblings(members)), outcome, setting) for (setting, outcome), members in paths.items()
    ]
    return [f"{setting}{members} | {outcome}" for members, outcome, setting in sorted(texts)]


def expand(texts: Iterable[str]) -> list[str]:
    """Return lines with one path each, sorted by path."""
    return [f"{setting}{path} | {outcome}" for path, outcome, setting in sorted(_expanded(texts))]


def _rows(plans: Mapping[str, Rows]) -> Iterator[tuple[str, str, int, str]]:
    """Yield (dtype with a colon if not all plans have the row, pattern, number of modules, outcome)."""
    dtypes: dict[tuple[str, int, str, str, str | None], dict[str, list[str]]] = {}
    for setting, rows in plans.items():
        for (pattern, structure, op, dtype, reason), count in rows:
            key = (pattern, count, structure, op, reason)
            dtypes.setdefault(key, defaultdict(list))[setting].append(dtype)
    for (pattern, count, structure, op, reason), by_setting in dtypes.items():
        each = {setting: sorted(by_setting.get(setting, [])) for setting in plans}
        if len({len(names) for names in each.values()}) == 1:
            pairs = [("", "/".join(dict.fromkeys(row))) for row in zip(*each.values(), strict=True)]
        else:
            pairs = [(f"{setting}: ", name) for setting, names in each.items() for name in names]
        for prefix, dtype in pairs:
            outcome = (op, dtype) if reason is None else (f"left: {' '.join(reason.split())}",)
            yield prefix, pattern, count, " | ".join((structure, *outcome))


def _siblings(members: list[tuple[str, str]]) -> list[str]:
    """Return the paths, with the names of modules in one parent in braces."""
    names: dict[tuple[str, str], list[str]] = defaultdict(list)
    for path, count in members:
        parent, dot, name = path.rpartition(".")
        names[parent + dot, count].append(name)
    texts: list[str] = []
    for (parent, count), group in names.items():
        if parent and len(group) > 1:
            group = ["{" + ",".join(sorted(group)) + "}"]
        texts += [f"{parent}{name}{count}" for name in group]
    return sorted(texts)


def _expanded(texts: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Yield (path, outcome, dtype with a colon if not all plans have the row)."""
    for text in texts:
        paths, _, outcome = text.partition(" | ")
        setting, colon, rest = paths.rpartition(": ")
        for path in re.split(r", (?![^{]*\})", rest):
            match = _PATH.fullmatch(path)
            names = [path] if match is None else match["names"].split(",")
            before, after = ("", "") if match is None else (match["parent"], match["count"] or "")
            for name in names:
                yield f"{before}{name}{after}", outcome, f"{setting}{colon}"
