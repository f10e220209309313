"""Train a small language model, to measure accuracy on trained weights:

python -m benchmarks.train_lm --folder ~/my-lm

Llama's architecture, some three million parameters, a byte-level BPE of its own, text that ships with Python. It writes
Python that looks right from afar. The same Python version, torch and number of threads give the same weights.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from torch import Tensor

from benchmarks.lm_text import corpus
from hf_cpu_accel.runtime.home_folder import home_folder
from hf_cpu_accel.runtime.private_files import make_folder
from hf_cpu_accel.runtime.threads import apply_threads

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

_END = "<|endoftext|>"


@dataclass(frozen=True)
class Recipe:
    """The model and its training. The defaults take some five minutes on two cores of 2024's servers."""

    vocabulary: int = 1024
    hidden: int = 256
    intermediate: int = 768
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    context: int = 256
    batch: int = 4
    steps: int = 1600
    learning_rate: float = 2e-3
    seed: int = 0


def default_folder() -> Path:
    """Return the default folder of the model."""
    return home_folder() / "bench" / "lm"


def train(
    texts: Sequence[str],
    recipe: Recipe,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Return a trained model in eval mode, float32, and its tokenizer.

    Args:
        texts: documents; the model sees as much of them as its steps need, each part at most once while there are enough.
        on_step: called with the number of steps done and the last one's loss, in nats per token.
    """
    from transformers import AutoModelForCausalLM, LlamaConfig

    tokenizer = _tokenizer(texts, recipe.vocabulary)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden,
        intermediate_size=recipe.intermediate,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        max_position_embeddings=4 * recipe.context,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config).train()
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.1
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: _warmup_cosine(step, recipe.steps)
        )
        rows = windows(tokenizer, texts, recipe.context, recipe.steps * recipe.batch)
        batches = _batches(rows, recipe.batch)
        for step, batch in zip(range(1, recipe.steps + 1), batches, strict=False):
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
            on_step(step, loss.item())
    return model.eval(), tokenizer


def windows(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], context: int, at_most: int) -> Tensor:
    """Documents behind one another, an end token after each, cut to int64 [windows, context], `at_most` windows."""
    ids: list[int] = []
    for text in texts:
        if len(ids) >= at_most * context:
            break
        ids += [*tokenizer.backend_tokenizer.encode(text).ids, tokenizer.eos_token_id]
    count = min(at_most, len(ids) // context)
    if count == 0:
        raise ValueError(f"context={context}: the text has {len(ids)} tokens, less than one window")
    return torch.tensor(ids[: count * context]).view(count, context)


def _tokenizer(texts: Sequence[str], vocabulary: int) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=_END, eos_token=_END, pad_token=_END)


def _batches(rows: Tensor, batch: int) -> Iterator[Tensor]:
    while True:  # a new order each time round
        yield from (rows[chosen] for chosen in torch.randperm(len(rows)).split(batch))


def _warmup_cosine(step: int, steps: int, warmup: float = 0.05, floor: float = 0.05) -> float:
    begun = step / max(1, warmup * steps)
    return min(begun, floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps))))


def main(
    folder: Annotated[
        Path | None, typer.Option(help="Folder to save to [default: bench/lm in the cache folder].")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = Recipe.steps,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads [default: the choice of `hf-cpu-accel doctor`].")
    ] = None,
) -> None:
    """Train on text that ships with Python, and save the model and the tokenizer."""
    from rich.progress import Progress, TextColumn

    apply_threads(threads)
    where = folder or default_folder()
    make_folder(where)  # before the minutes, not after them
    recipe = Recipe(steps=steps)
    start = time.monotonic()
    with Progress(*Progress.get_default_columns(), TextColumn("{task.fields[loss]}")) as progress:
        bar = progress.add_task("training", total=steps, loss="")
        model, tokenizer = train(
            corpus().train,
            recipe,
            lambda step, loss: progress.update(bar, completed=step, loss=f"{loss:.3f} nats per token"),
        )
    model.save_pretrained(where)
    tokenizer.save_pretrained(where)
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    typer.echo(f"{size:.1f} million parameters, {time.monotonic() - start:.0f} s, saved in {where}")


if __name__ == "__main__":
    typer.run(main)
