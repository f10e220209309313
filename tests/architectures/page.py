"""Tables of what a sweep has found: for the terminal, and as docs/reference/models.md."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

Result = dict[str, Any]

_DTYPES = ("float32", "bfloat16", "int8", "int4")
_REASONS = 3  # told of one type
_HEAD = """\
# Every model type of transformers

`make test-architectures` takes each type of transformers' `CONFIG_MAPPING`, makes a small model of its own default config
(two layers, widths of 64, random weights that let errors show), runs it, accelerates it in each dtype, and compares: the
plain batch, and for texts one that is padded on the right and one on the left, at all tokens and in all pooled outputs.
Then it is restored and compared bit by bit, strides included. This page is written from the results in
`build/architectures.json` by `make docs-models`, which runs float32 alone, and by `make test-architectures
ARCHITECTURES=--page` from those of all dtypes.

*Layers* says how many transformer layers run as a whole: in one op, in the few of a layer with recurrence, latents or a grid, or
recorded: as the list of steps that its first call took, without the Python between them ([how it
works](how-it-works.md#layers-of-no-known-form)). A
recorded layer counts if the calls here reach it and its linears and attention (softmax) are ours;
its norms, sums, views and products with positions are torch's, its convolutions where torch's are as fast, and, as in layers of a
few ops, the product that chooses experts and linears of fewer than 16 features. How many of the
whole ones are recorded is said below. A transformer layer is a member of a list of modules that holds four linears or more, and
no such member itself; a model has some if attention is computed in one of them (`tests/architectures/layers.py`). So
convolutional networks, codecs and purely recurrent networks have none, and layers with recurrence in a hybrid count. What is
not whole runs in parts: its linears, norms and attention are ours, one by one. `hf-cpu-accel supports MODEL` says the same of
one model's real config.

Bounds of errors are those of [dtypes and accuracy](dtypes-and-accuracy.md) (relative to the norm of an output: 1e-4 in float32,
0.02 in bfloat16, 0.1 in int8, 0.3 in int4). Where a model is more sensitive than that (experts or keys that are chosen among
nearly equal ones, codebooks), it may be off by as much as four times what the unaccelerated model is when its weights alone
are rounded as much, and where it chooses experts or keys, one row of four may be moved in the narrow dtypes. Such dtypes are
marked *. int4 is tried on models of text. Outputs that follow from a choice which rounding may change (keypoints of SuperPoint,
SuperGlue and LightGlue, the length of FastSpeech's sound) are compared in float32 alone.

"""


def summary(found: list[Result]) -> str:
    """What is wrong, type by type, and how many are what."""
    wrong = [f"{result['type']}: {problem}" for result in found for problem in result["problems"]]
    return "\n".join([*wrong, _counted(found), counted_layers(found)])


def _counted(found: list[Result]) -> str:
    counts = Counter(result["status"] for result in found)
    ran = len(found) - counts["not run"]
    return (
        f"{len(found)} types: {ran} run, {counts['right']} right, {counts['wrong']} wrong, "
        f"{counts['not explained']} right but not explained, {counts['not run']} not run"
    )


def counted_layers(found: list[Result]) -> str:
    """How many types have all their layers whole, of those that have some."""
    told = [layers for layers in map(_layers, found) if layers]
    whole = sum(not any(layers.values()) for layers in told)
    none = sum(all(layers.values()) for layers in told)
    share = 100 * whole / max(len(told), 1)
    recorded = sum(any(told.get("recorded") for told in r.get("dtypes", {}).values()) for r in found)
    return (
        f"{len(told)} types have transformer layers: all are whole in {whole} ({share:.0f} %), none in {none}; "
        f"{recorded} have recorded ones"
    )


def write_page(found: list[Result], page: Path) -> None:
    """The table of all types, why layers are not whole, and why some types were not run."""
    ran = [result for result in found if result["status"] != "not run"]
    dtypes = [name for name in _DTYPES if any(name in result.get("dtypes", {}) for result in ran)]
    rows = "\n".join(_row(result, dtypes) for result in ran)
    reasons = "\n".join(f"| {r['type']} | {_cell(r['reason'])} |" for r in found if r["status"] == "not run")
    head = [
        "Type",
        "Model",
        *(f"Error in {name}" for name in dtypes),
        "Padding",
        "Layers",
        "Not whole because",
    ]
    rule = ["---", "---", *("---:" for _ in dtypes), "---", "---:", "---"]
    page.write_text(
        f"{_HEAD}{_counted(found)}. {counted_layers(found)}.\n\n"
        f"| {' | '.join(head)} |\n| {' | '.join(rule)} |\n{rows}\n\n"
        "## What is in the way\n\n"
        f"| Types | Because |\n| ---: | --- |\n{_obstacles(ran)}\n\n"
        "## Not run\n\n"
        "Most need inputs or configs that belong to one model alone, or libraries that are not installed.\n\n"
        f"| Type | Because (the first try) |\n| --- | --- |\n{reasons}\n"
    )


def _layers(result: Result) -> dict[str, str | None]:
    """{path of a transformer layer: None or why it is not whole}, in the first dtype; none for a model without any."""
    if "layers" not in result:
        return {}
    first: Result = next(iter(result.get("dtypes", {}).values()), {})
    told: dict[str, str | None] = first.get("layers", {})
    return told


def _row(result: Result, names: list[str]) -> str:
    dtypes, layers = result.get("dtypes", {}), _layers(result)
    whole = f"{sum(reason is None for reason in layers.values())}/{len(layers)}" if layers else ""
    verdict = "" if result["status"] == "right" else _cell("; ".join(result["problems"]))
    padding = ", ".join(result.get("padding", ()))
    errors = [_error(dtypes.get(name)) for name in names]
    cells = [result["type"], result.get("class", ""), *errors, padding, whole, verdict or _not_whole(result)]
    return f"| {' | '.join(cells)} |"


def _not_whole(result: Result) -> str:
    """Which kinds of layers are not whole, and why."""
    kinds = result.get("layers", {})
    told = dict.fromkeys(
        f"{kinds[path]}: {_short(reason)}" for path, reason in _layers(result).items() if reason is not None
    )
    more = [f"and {len(told) - _REASONS} more"] if len(told) > _REASONS else []
    return "; ".join([*map(_cell, list(told)[:_REASONS]), *more])


def _obstacles(ran: list[Result]) -> str:
    """The reasons of several types, the most frequent first."""
    counts: Counter[str] = Counter()
    for result in ran:
        counts.update({_short(reason) for reason in _layers(result).values() if reason is not None})
    rows = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    return "\n".join(f"| {count} | {_cell(reason)} |" for reason, count in rows if count > 1)


def _short(reason: str) -> str:
    """Without what every reason of a layer ends with."""
    return reason.removesuffix(": its parts run separately")


def _error(told: Result | None) -> str:
    if told is None or "error" not in told:
        return ""
    return f"{told['error']:.0e}{' *' if told.get('sensitive') else ''}"


def _cell(text: str) -> str:
    """In one cell of a table."""
    return " ".join(text.replace("|", "/").replace("<", "(").replace(">", ")").split())[:160]
