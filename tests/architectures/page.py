"""Print the results of a sweep over all model types, and write docs/reference/models.md."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

Result = dict[str, Any]

_DTYPES = ("float32", "bfloat16", "int8", "int4")
_REASONS = 3  # shown per type
_HEAD = """\
# Model types

The table lists every model type in transformers' `CONFIG_MAPPING`. Each type is tested with a small model of its default
config: two layers, widths of 64, random weights. The test compares the accelerated model with eager in each dtype. Texts are
compared with padding on the right and on the left, at all tokens and pooled outputs. After `restore`, the model is
equal bit by bit, strides included.

**Layers** counts the transformer layers that run as a whole, of all. Such a layer runs in one op, in the few ops of a layer
with recurrence, latents or a grid, or as [recorded steps](../explanation/how-it-works.md#layers-of-no-known-form). In a
recorded layer, linears and attention are ops of this library. Norms, sums, views and small linears may be torch's. Other layers
run in parts: their linears, norms and attention are replaced one by one. `hf-cpu-accel supports MODEL` checks the config of one
model.

A transformer layer is a member of a list of modules that has four linears or more, and no such member itself. A model has
transformer layers if one of them computes attention (`tests/architectures/layers.py`). Convolutional networks, codecs and
purely recurrent networks have none.

**Error** is relative to the norm of an output. The limits are 1e-4 in float32, 0.02 in bfloat16, 0.1 in int8 and 0.3 in int4
([dtypes and accuracy](dtypes.md)). An error marked * is above its limit, in a model that amplifies rounding, such as one that
chooses among nearly equal experts, keys or codes. It is at most four times the error of eager with weights rounded to the same
precision. If the model chooses experts or keys, one row of four may differ in narrow dtypes. int4 is tested on models of text.
Outputs that depend on a choice (keypoints of SuperPoint, SuperGlue and LightGlue, the length of FastSpeech's audio) are
compared in float32 only.

`make docs-models` writes this page from a run in float32, and `make test-architectures ARCHITECTURES=--page` from a run in all
dtypes.

"""


def summary(found: list[Result]) -> str:
    """Return the failures of each type, and the counts of all."""
    wrong = [f"{result['type']}: {problem}" for result in found for problem in result["problems"]]
    return "\n".join([*wrong, _counted(found), counted_layers(found)])


def _counted(found: list[Result]) -> str:
    counts = Counter(result["status"] for result in found)
    ran = len(found) - counts["not run"]
    return (
        f"{len(found)} types: {ran} tested, {counts['right']} passed, {counts['wrong']} failed, "
        f"{counts['not explained']} passed without a complete plan, {counts['not run']} not tested"
    )


def counted_layers(found: list[Result]) -> str:
    """Return how many types run all their transformer layers as a whole."""
    told = [layers for layers in map(_layers, found) if layers]
    whole = sum(not any(layers.values()) for layers in told)
    none = sum(all(layers.values()) for layers in told)
    share = 100 * whole / max(len(told), 1)
    recorded = sum(any(told.get("recorded") for told in r.get("dtypes", {}).values()) for r in found)
    return (
        f"{len(told)} types have transformer layers. All layers run as a whole in {whole} types ({share:.0f} %), none in {none}. "
        f"{recorded} types have recorded layers"
    )


def write_page(found: list[Result], page: Path) -> None:
    """Write the table of all types, the reasons for layers that are not whole, and the types that were not tested."""
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
        "Reason if not whole",
    ]
    rule = ["---", "---", *("---:" for _ in dtypes), "---", "---:", "---"]
    page.write_text(
        f"{_HEAD}{_counted(found)}. {counted_layers(found)}.\n\n"
        f"| {' | '.join(head)} |\n| {' | '.join(rule)} |\n{rows}\n\n"
        "## Frequent reasons\n\n"
        f"| Types | Reason |\n| ---: | --- |\n{_obstacles(ran)}\n\n"
        "## Not tested\n\n"
        "Most of these need inputs or configs of their own, or libraries that are not installed.\n\n"
        f"| Type | Reason (of the first attempt) |\n| --- | --- |\n{reasons}\n"
    )


def _layers(result: Result) -> dict[str, str | None]:
    """Return {path of a transformer layer: None, or the reason why it is not whole} in the first dtype."""
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
    """Return the kinds of layers that are not whole, with reasons."""
    kinds = result.get("layers", {})
    told = dict.fromkeys(
        f"{kinds[path]}: {_short(reason)}" for path, reason in _layers(result).items() if reason is not None
    )
    more = [f"and {len(told) - _REASONS} more"] if len(told) > _REASONS else []
    return "; ".join([*map(_cell, list(told)[:_REASONS]), *more])


def _obstacles(ran: list[Result]) -> str:
    """Return rows of the reasons that several types share, the most frequent first."""
    counts: Counter[str] = Counter()
    for result in ran:
        counts.update({_short(reason) for reason in _layers(result).values() if reason is not None})
    rows = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    return "\n".join(f"| {count} | {_cell(reason)} |" for reason, count in rows if count > 1)


def _short(reason: str) -> str:
    """Return a reason without the suffix that all reasons of layers have."""
    return reason.removesuffix(": its parts run separately")


def _error(told: Result | None) -> str:
    if told is None or "error" not in told:
        return ""
    return f"{told['error']:.0e}{' *' if told.get('sensitive') else ''}"


def _cell(text: str) -> str:
    """Return text that fits in one cell of a table."""
    return " ".join(text.replace("|", "/").replace("<", "(").replace(">", ")").split())[:160]
