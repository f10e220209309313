"""`model(**inputs)` of language models, for which transformers makes a cache of its own: milliseconds, eager and accelerated.

    python -m benchmarks.generation.plain_calls [Llama-3.2-1B Qwen2.5-0.5B] [--tokens 128] [--dtype int8] [--layers 8]

"without a cache" is the same call with `use_cache=False`; the call with one may take at most 5 % more. "a step" is one more token
behind the others, as loops that people write themselves do it, over transformers' `DynamicCache`. Random weights, real shapes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from benchmarks.quiet import exclusive
from hf_cpu_accel import accelerate_for_cpu
from hf_cpu_accel.cli.random_models import config, seeded
from hf_cpu_accel.cli.tables import wide_console
from hf_cpu_accel.measure import interleaved, speedup

DEFAULT = ("Llama-3.2-1B", "Qwen2.5-0.5B")
MOST = 1.05  # times as long as without a cache


def build(name: str, layers: int | None) -> Any:
    """Return the model in eval mode, with at most `layers` layers."""
    from transformers import AutoModelForCausalLM

    shape = config(name)
    if layers is not None:
        shape.num_hidden_layers = min(layers, shape.num_hidden_layers)
        if getattr(shape, "layer_types", None):
            shape.layer_types = shape.layer_types[: shape.num_hidden_layers]
    return seeded(lambda: AutoModelForCausalLM.from_config(shape))


def calls(model: Any, ids: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Return the timed calls by name."""
    cache = model(ids, logits_to_keep=1).past_key_values

    def step() -> None:
        model(ids[:, :1], past_key_values=cache)
        cache.crop(-1)

    return {
        "plain": lambda: model(ids, logits_to_keep=1),
        "without a cache": lambda: model(ids, logits_to_keep=1, use_cache=False),
        "a step": step,
    }


def main(
    names: Annotated[
        list[str] | None, typer.Argument(help="Names of `hf-cpu-accel bench --random-config`.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=2)] = 128,
    dtype: Annotated[str, typer.Option()] = "int8",
    layers: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of layers [default: all].")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 7,
) -> None:
    """Print milliseconds, and how much longer a call with a cache takes; the exit code is 1 if that is more than 5 %."""
    torch.set_grad_enabled(False)
    table = Table("model", "call", "eager, ms", "accelerated, ms", "times as fast", "to without a cache")
    missed = False
    with exclusive():
        for name in names or DEFAULT:
            eager = build(name, layers)
            model = accelerate_for_cpu(copy.deepcopy(eager), dtype=dtype, originals="drop")
            ids = torch.randint(3, 1000, (1, tokens))
            systems = {f"eager {kind}": call for kind, call in calls(eager, ids).items()}
            systems |= calls(model, ids)
            times = interleaved(systems, rounds=rounds, calls=2, seconds=0.2)
            for kind in ("plain", "without a cache", "a step"):
                gain = speedup(times[f"eager {kind}"], times[kind]).value
                ratio = 1 / speedup(times["without a cache"], times[kind]).value
                missed |= kind == "plain" and ratio > MOST
                table.add_row(
                    name, f"{kind}, {tokens} tokens" if kind != "a step" else f"{kind} after {tokens} tokens",
                    f"{1e3 * times[f'eager {kind}'].best:.1f}", f"{1e3 * times[kind].best:.1f}", f"{gain:.2f}x",
                    f"{ratio:.2f}" if kind == "plain" else "",
                )  # fmt: skip
    wide_console().print(table)
    raise typer.Exit(int(missed))


if __name__ == "__main__":
    typer.run(main)
