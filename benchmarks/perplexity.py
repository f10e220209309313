"""Compare perplexity on held-out text of eager float32 and of this package in each dtype:

python -m benchmarks.train_lm && python -m benchmarks.perplexity

It is measured twice, since different kernels run: over whole windows (prefill), and token by token inside `generate` (decode).
In float32, greedy search has to return the same tokens. The exit code is 1 if a bar is missed.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from rich.table import Table
from torch import Tensor

from benchmarks import report
from benchmarks.lm_text import corpus
from benchmarks.results.store import Table as ResultTable
from benchmarks.session import Keep, Out, Threads, check_folder, keep
from benchmarks.train_lm import default_folder, windows
from hf_cpu_accel import CPUAccelConfig, accelerate_for_cpu
from hf_cpu_accel.cli.tables import results_table, wide_console
from hf_cpu_accel.config import DTYPES
from hf_cpu_accel.measure.environment import environment
from hf_cpu_accel.runtime.home_folder import home_folder
from hf_cpu_accel.runtime.private_files import make_folder
from hf_cpu_accel.runtime.threads import apply_threads

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# By how much of eager float32's perplexity a dtype's may differ.
BARS = {"float32": 1e-4, "bfloat16": 0.003, "int8": 0.01, "int8-weight": 0.01, "int4": 0.03}
# The same for what a narrow cache costs beside float32 weights.
CACHE_BARS = {"bfloat16": 0.001, "int8": 0.003}
EAGER = "eager-fp32"
_HEADINGS = ("system", "reading", "to fp32", "writing", "to fp32", "bar", "greedy\ntokens", "met")


@dataclass(frozen=True)
class Plan:
    """Amounts of text: windows read in one call, and windows whose tokens after the first `prompt` are decoded."""

    context: int = 256
    read: int = 120
    written: int = 8
    prompt: int = 32
    greedy_prompts: int = 2
    greedy_new: int = 256


@dataclass(frozen=True)
class Result:
    """Perplexities of one system. `greedy` is the share of tokens that greedy search has in common with eager float32's, up to
    the first that differs."""

    system: str
    reading: float
    writing: float
    reading_ratio: float
    writing_ratio: float
    greedy: float
    bar: float | None

    @property
    def met(self) -> bool | None:
        """Return whether both perplexities are within the bar, and in float32 all tokens equal; None without a bar."""
        if self.bar is None:
            return None
        near = all(abs(ratio - 1) <= self.bar for ratio in (self.reading_ratio, self.writing_ratio))
        return near and (self.system != "ours-float32" or self.greedy == 1)


def evaluate(
    model: PreTrainedModel,
    held_out: Tensor,
    dtypes: Sequence[str],
    plan: Plan,
    say: Callable[[str], None] = lambda text: None,
) -> list[Result]:
    """Evaluate eager float32 (the base), eager bfloat16, each dtype, and float32 with each narrower cache.

    Args:
        model: float32, in eval mode; stays as it is.
        held_out: token ids int64 [windows, plan.context].
    """
    systems: list[tuple[str, CPUAccelConfig | None, float | None]] = [
        (EAGER, None, None),
        ("eager-bf16", None, None),
        *((f"ours-{dtype}", CPUAccelConfig(dtype=dtype), BARS.get(dtype)) for dtype in dtypes),
        *(
            (f"ours-float32-{kv_cache}-cache", CPUAccelConfig(dtype="float32", kv_cache=kv_cache), bar)
            for kv_cache, bar in CACHE_BARS.items()
        ),
    ]
    results: list[Result] = []
    base_tokens: Tensor | None = None
    for name, config, bar in systems:
        say(name)
        copied = copy.deepcopy(model)
        if config is not None:
            accelerate_for_cpu(copied, config, originals="drop")
        elif name == "eager-bf16":
            copied = copied.to(torch.bfloat16)
        read = reading(copied, held_out[: plan.read])
        written = writing(copied, held_out[-plan.written :], plan.prompt)
        tokens = greedy(copied, held_out[: plan.greedy_prompts, : plan.prompt], plan.greedy_new)
        base_tokens = tokens if base_tokens is None else base_tokens
        base = results[0] if results else None
        results.append(
            Result(
                name,
                read,
                written,
                read / base.reading if base else 1.0,
                written / base.writing if base else 1.0,
                _common(tokens, base_tokens),
                bar,
            )
        )
    return results


@torch.inference_mode()
def reading(model: PreTrainedModel, ids: Tensor) -> float:
    """Return the perplexity of windows [n, context] in one forward pass each, for every token but the first."""
    total = 0.0
    for window in ids.split(1):
        logits = model(input_ids=window).logits.float()
        total += torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), window[:, 1:].flatten(), reduction="sum"
        ).item()
    return math.exp(total / (ids.shape[0] * (ids.shape[1] - 1)))


@torch.inference_mode()
def writing(model: PreTrainedModel, ids: Tensor, prompt: int) -> float:
    """Return the perplexity of windows [n, context] after their first `prompt` tokens, decoded by a forced `generate`."""
    total = 0.0
    for window in ids.split(1):
        dictation = _Dictation(window[0])
        model.generate(
            input_ids=window[:, :prompt],
            attention_mask=torch.ones_like(window[:, :prompt]),
            logits_processor=[dictation],
            max_new_tokens=window.shape[1] - prompt,
            do_sample=False,
            eos_token_id=None,
        )
        total += dictation.nats
    return math.exp(total / (ids.shape[0] * (ids.shape[1] - prompt)))


def greedy(model: PreTrainedModel, prompts: Tensor, new: int) -> Tensor:
    """Return int64 [n, new]: the greedy tokens after each of prompts [n, tokens], without an early stop."""
    written = [
        model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
        )[:, prompt.shape[1] :]
        for prompt in prompts.split(1)
    ]
    return torch.cat(written)


class _Dictation:
    """A logits processor that forces `generate` to the tokens of the text, and sums their negative log-likelihoods."""

    def __init__(self, tokens: Tensor) -> None:
        self._tokens = tokens
        self.nats = 0.0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        token = int(self._tokens[input_ids.shape[1]])
        self.nats -= torch.log_softmax(scores.float(), dim=-1)[0, token].item()
        forced = torch.full_like(scores, -math.inf)
        forced[:, token] = 0
        return forced


def _common(tokens: Tensor, base: Tensor) -> float:
    same = (tokens == base).cumprod(dim=1)
    return same.sum().item() / same.numel()


def main(
    folder: Annotated[
        Path | None, typer.Option(help="Folder of a trained model [default: the one of train_lm].")
    ] = None,
    dtypes: Annotated[str, typer.Option(help="Comma-separated dtypes.")] = ",".join(
        dtype for dtype in DTYPES if dtype != "auto"
    ),
    threads: Threads = None,
    out: Out = None,
    record: Keep = None,
) -> None:
    """Measure every dtype on text that the model was not trained on."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = folder or default_folder()
    if not (where / "config.json").exists():
        raise typer.BadParameter(
            f"no model in {where}; run `python -m benchmarks.train_lm`, or pass --folder"
        )
    check_folder(record)
    choice = apply_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32).eval()
    plan = Plan()
    ids = windows(
        AutoTokenizer.from_pretrained(where), corpus().held_out, plan.context, plan.read + plan.written
    )
    console = wide_console()
    with console.status("") as status:
        results = evaluate(model, ids, [name.strip() for name in dtypes.split(",")], plan, status.update)
    console.print(table(results))
    facts = environment()
    out = out or home_folder() / "bench" / "results.jsonl"
    make_folder(out.parent)
    with out.open("a", encoding="utf-8") as lines:
        for result in results:
            lines.write(
                json.dumps({**facts, "workload": "perplexity", **asdict(result), "met": result.met}) + "\n"
            )
    kept = ResultTable(
        "Perplexity",
        "held-out text under a small trained model",
        str(facts["date"]),
        "python -m benchmarks.perplexity",
        report.setup(facts, choice.count),
        report.versions(facts),
        tuple(heading.replace("\n", " ") for heading in _HEADINGS),
        tuple(cells(result) for result in results),
    )
    keep(record, [kept])
    if any(result.met is False for result in results):
        raise typer.Exit(1)


def cells(result: Result) -> tuple[str, ...]:
    """Return one row, in the order of the headings."""
    return (
        result.system,
        f"{result.reading:.3f}",
        f"{result.reading_ratio - 1:+.2%}",
        f"{result.writing:.3f}",
        f"{result.writing_ratio - 1:+.2%}",
        "" if result.bar is None else f"{result.bar:.2%}",
        f"{result.greedy:.0%}",
        {None: "", True: "yes", False: "NO"}[result.met],
    )


def table(results: Sequence[Result]) -> Table:
    """Return the table for the terminal."""
    out = results_table(_HEADINGS, "Perplexity on held-out text")
    for result in results:
        out.add_row(*cells(result))
    return out


if __name__ == "__main__":
    typer.run(main)
