"""Small decoders with different tokens, and the results that a process writes about one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.checkpoints.stored_weight import plain_tensors

PROMPT = torch.arange(3, 12)[None]
NEW = 24
NEOX = {"vocab_size": 300, "hidden_size": 128}


def save_llama(folder: Path) -> None:
    """Tied to its embedding, with a vocabulary that two do not share evenly."""
    _save(
        LlamaForCausalLM,
        LlamaConfig(
            vocab_size=401,
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            eos_token_id=None,
            bos_token_id=None,
        ),
        folder,
    )


def save_neox(folder: Path) -> None:
    """Biases everywhere, queries, keys and values in one linear, and a head of its own."""
    config = GPTNeoXConfig(
        **NEOX,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        eos_token_id=None,
        bos_token_id=None,
    )
    _save(GPTNeoXForCausalLM, config, folder)


def _save(model_class: type, config: Any, folder: Path) -> None:
    torch.manual_seed(11)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=0.3 if parameter.dim() == 1 else 1.5 * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)


def tokens(model: Any) -> list[int]:
    with torch.no_grad():
        generated = model.generate(PROMPT, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    return generated[0, PROMPT.shape[1] :].tolist()


def logits(model: Any) -> list[float]:
    with torch.no_grad():
        return model(PROMPT).logits[0, -1].float().tolist()


def weight_bytes(model: Any) -> int:
    """Return the bytes of the parameters of this process, packed or not."""
    held = {
        tensor.data_ptr(): tensor.nbytes
        for parameter in model.parameters()
        for tensor in plain_tensors(parameter)
    }
    return sum(held.values()) + sum(item.packed_bytes for item in explain(model).replaced)


def report(folder: Path, **options: Any) -> dict[str, Any]:
    """Return the results of the model in `folder`: eager, in each dtype, and restored."""
    model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    found: dict[str, Any] = {"eager": tokens(model), "logits": logits(model)}
    for dtype in ("float32", "int8", "bfloat16"):
        accelerate_for_cpu(model, dtype=dtype, threads=1)
        plan = explain(model)
        found[dtype] = {
            "tokens": tokens(model),
            "logits": logits(model),
            "bytes": weight_bytes(model),
            "left": sorted({(item.structure, item.reason or "") for item in plan.left}),
            "notes": list(plan.notes),
        }
    restore(model)
    after = dict(model.named_parameters())
    found["restored"] = list(before) == list(after) and all(
        type(after[name]) is type(values.requires_grad_(after[name].requires_grad))
        or type(after[name].data) is type(values)
        for name, values in before.items()
    )
    found["same"] = all(
        torch.equal(next(plain_tensors(after[name])), next(plain_tensors(values)))
        for name, values in before.items()
    )
    found["tokens again"] = tokens(model)
    return found
