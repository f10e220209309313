"""A plan as a foldable HTML tree, for notebooks and `hf-cpu-accel report`. It contains no scripts and loads no files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape
from typing import Protocol

STYLE = """
.plan-tree { font: 13px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
.plan-tree ul { list-style: none; margin: 0; padding-left: 1.2em; }
.plan-tree > ul { padding-left: 0; }
.plan-tree summary { cursor: pointer; }
.plan-tree code { font-size: 12px; background: none; padding: 0; }
.plan-tree .dtype { color: #2f7ebc; }
.plan-tree .left { color: #b45309; }
.plan-tree .size { opacity: .65; }
"""


class Row(Protocol):
    """The attributes of `plan.PlanItem` that the tree shows."""

    @property
    def name(self) -> str: ...
    @property
    def structure(self) -> str: ...
    @property
    def op(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def reason(self) -> str | None: ...
    @property
    def packed_bytes(self) -> int: ...
    @property
    def copied_bytes(self) -> int: ...


@dataclass
class _Node:
    rows: list[Row] = field(default_factory=list)
    children: dict[str, _Node] = field(default_factory=dict)

    def walk(self) -> Iterable[Row]:
        yield from self.rows
        for child in self.children.values():
            yield from child.walk()

    def content_key(self) -> str:
        """Return a string that is equal for nodes with equal contents under different paths."""
        rows = [(row.structure, row.op, row.dtype, row.reason) for row in self.rows]
        return repr((rows, [(name, child.content_key()) for name, child in self.children.items()]))


def tree(rows: Iterable[Row], header: str = "") -> str:
    """Return the tree as a `<div>` with its style; equal neighbors in a list become one entry.

    Args:
        rows: the items of a plan.
        header: lines of text above the tree.
    """
    root = _Node()
    for row in rows:
        node = root
        for part in filter(None, row.name.split(".")):
            node = node.children.setdefault(part, _Node())
        node.rows.append(row)
    lines = "".join(f"<p>{escape(line)}</p>" for line in header.splitlines())
    return f'<div class="plan-tree"><style>{STYLE}</style>{lines}<ul>{_items(root, 0)}</ul></div>'


def _items(node: _Node, depth: int) -> str:
    rows = "".join(f"<li>{_description(row)}</li>" for row in node.rows) if depth == 0 else ""
    return rows + "".join(_entry(names, child, depth) for names, child in _runs(node))


def _entry(names: list[str], node: _Node, depth: int) -> str:
    count = f" <b>x{len(names)}</b>" if len(names) > 1 else ""
    label = f"<code>{escape(names[0] if len(names) == 1 else f'{names[0]}-{names[-1]}')}</code>{count}"
    if len(node.rows) > 1 and not node.children:
        entries = "".join(f"<li>{_description(row)}</li>" for row in node.rows)
        return f"<li>{label}{_size(node, len(names))}<ul>{entries}</ul></li>"
    text = " ".join(_description(row) for row in node.rows)
    if not node.children:
        return f"<li>{label} {text}{_size(node, len(names))}</li>"
    state = " open" if depth < 2 else ""
    left = sum(row.reason is not None for row in node.walk())
    left_count = f' <span class="left">{left} left</span>' if left and not text else ""
    return (
        f"<li><details{state}><summary>{label} {text}{left_count}{_size(node, len(names))}</summary>"
        f"<ul>{_items(node, depth + 1)}</ul></details></li>"
    )


def _runs(node: _Node) -> list[tuple[list[str], _Node]]:
    """Group the children: consecutive numbers with equal contents are one group, shown by its first node."""
    runs: list[tuple[list[str], _Node]] = []
    for name, child in node.children.items():
        numbered = bool(runs) and name.isdecimal() and runs[-1][0][-1].isdecimal()
        if numbered and runs[-1][1].content_key() == child.content_key():
            runs[-1][0].append(name)
        else:
            runs.append(([name], child))
    return runs


def _description(row: Row) -> str:
    if row.reason is not None:
        return f'{escape(row.structure)} <span class="left">left: {escape(row.reason)}</span>'
    return f'{escape(row.structure)} → {escape(row.op)} <span class="dtype">{escape(row.dtype)}</span>'


def _size(node: _Node, count: int) -> str:
    nbytes = sum(row.packed_bytes + row.copied_bytes for row in node.walk())
    if not nbytes:
        return ""
    each = " each" if count > 1 else ""
    return f' <span class="size">{nbytes / 1e6:.2f} MB{each}</span>'
