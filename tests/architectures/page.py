"""Tables of what a sweep has found: for the terminal, and as docs/architectures.md."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

Result = dict[str, Any]

_HEAD = """\
# Every model type of transformers

`make test-architectures` takes each type of transformers' `CONFIG_MAPPING`, makes a small model of its own default config
(two layers, widths of 64, random weights that let errors show), runs it, accelerates it in each dtype, and compares: the
plain batch, and for texts one that is padded on the right and one on the left, at all tokens and in all pooled outputs.
Then it is restored and compared bit by bit, strides included. This page is written by `make test-architectures
ARCHITECTURES=--page` from the results in `build/architectures.json`.

Bounds are those of [dtypes and accuracy](dtypes-and-accuracy.md) (relative to the norm of an output: 1e-4 in float32, 0.02
in bfloat16, 0.1 in int8, 0.3 in int4). Where a model is more sensitive than that (experts or keys that are chosen among
nearly equal ones, codebooks), it may be off by as much as four times what the unaccelerated model is when its weights alone
are rounded as much, and where it chooses experts or keys, one row of four may be moved in the narrow dtypes. Such dtypes are
marked *. int4 is tried on models of text. Outputs that follow from a choice which rounding may change (keypoints of SuperPoint,
SuperGlue and LightGlue, the length of FastSpeech's sound) are compared in float32 alone.

"""


def summary(found: list[Result]) -> str:
    """What is wrong, type by type, and how many are what."""
    wrong = [f"{result['type']}: {problem}" for result in found for problem in result["problems"]]
    return "\n".join([*wrong, _counted(found)])


def _counted(found: list[Result]) -> str:
    counts = Counter(result["status"] for result in found)
    ran = len(found) - counts["not run"]
    return (
        f"{len(found)} types: {ran} run, {counts['right']} right, {counts['wrong']} wrong, "
        f"{counts['not explained']} right but not explained, {counts['not run']} not run"
    )


def write_page(found: list[Result], page: Path) -> None:
    """The table of all types, and why some were not run."""
    ran = [result for result in found if result["status"] != "not run"]
    rows = "\n".join(map(_row, ran))
    reasons = "\n".join(f"| {r['type']} | {_cell(r['reason'])} |" for r in found if r["status"] == "not run")
    page.write_text(
        f"{_HEAD}{_counted(found)}.\n\n"
        "*Layers* are those that run in one call (in float32), *replaced* and *left* the modules that `explain()` tells of.\n\n"
        "| Type | Model | Largest error: float32 | bfloat16 | int8 | int4 | Padding | Layers | Replaced | Left | |\n"
        f"| --- | --- | ---: | ---: | ---: | ---: | --- | ---: | ---: | ---: | --- |\n{rows}\n\n"
        "## Not run\n\n"
        "Most need inputs or configs that belong to one model alone, or libraries that are not installed.\n\n"
        f"| Type | Because (the first try) |\n| --- | --- |\n{reasons}\n"
    )


def _row(result: Result) -> str:
    dtypes = result.get("dtypes", {})
    errors = [_error(dtypes.get(name)) for name in ("float32", "bfloat16", "int8", "int4")]
    first = dtypes.get("float32", {})
    counts = [str(first.get(name, "")) for name in ("fused", "replaced", "left")]
    verdict = "" if result["status"] == "right" else _cell("; ".join(result["problems"]))
    padding = ", ".join(result.get("padding", ()))
    cells = [result["type"], result.get("class", ""), *errors, padding, *counts, verdict]
    return f"| {' | '.join(cells)} |"


def _error(told: Result | None) -> str:
    if told is None or "error" not in told:
        return ""
    return f"{told['error']:.0e}{' *' if told.get('sensitive') else ''}"


def _cell(text: str) -> str:
    """In one cell of a table."""
    return " ".join(text.replace("|", "/").replace("<", "(").replace(">", ")").split())[:160]
