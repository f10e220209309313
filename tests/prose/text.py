"""The prose of a file, with everything else blanked out, so that lines and columns stay those of the file."""

from __future__ import annotations

import ast
import re
from pathlib import Path


def prose(path: Path) -> str:
    """Return the prose of a Markdown or a Python file (its docstrings), as long as the file.

    Raises:
        ValueError: the file is neither.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return markdown(text)
    if path.suffix == ".py":
        return docstrings(text)
    raise ValueError(f"{path}: expected a .md or a .py file")


def markdown(text: str) -> str:
    """Blank code blocks, HTML, addresses of links and signs of tables; a code span becomes one word of the same length."""
    text = re.sub(r"\A---\n.*?^---$", _blank, text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^ *```.*?^ *```", _blank, text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->|<[^>\n]+>", _blank, text, flags=re.DOTALL)
    text = _spans(text)
    text = re.sub(r"\]\([^)\n]*\)|\]\[[^\]\n]*\]", lambda match: "]" + " " * (len(match[0]) - 1), text)
    text = re.sub(r"^#+ .*$", _blank, text, flags=re.MULTILINE)
    # A cell of a table and an item of a list are sentences of their own.
    text = re.sub(r"^\|.*$", lambda row: re.sub(r" \|(?= |$)", " .", row[0]), text, flags=re.MULTILINE)
    return re.sub(r"^( *)(?:[-*]|\d+\.) ", _item, text, flags=re.MULTILINE)


def docstrings(source: str) -> str:
    """Blank everything but docstrings, and in them code, lists of arguments excluded."""
    lines = source.splitlines()
    shown = [""] * len(lines)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                assert first.end_lineno is not None
                shown[first.lineno - 1 : first.end_lineno] = [
                    line.replace('"""', "   ") for line in lines[first.lineno - 1 : first.end_lineno]
                ]
    return _spans("\n".join(shown))


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match[0])


def _item(match: re.Match[str]) -> str:
    return "." + " " * (len(match[0]) - 1)


def _spans(text: str) -> str:
    return re.sub(
        r"(`+)(?!`)(.+?)(?<!`)\1(?!`)",
        lambda match: re.sub(r"[^\n]", "`", match[0]).replace("\n", "`"),
        text,
    )
