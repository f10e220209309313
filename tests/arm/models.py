"""Trained models in the emulator, and on this machine: `python -m tests.arm.models TIER GIVEN FOUND`.

GIVEN holds token ids, and which folders the models lie in; FOUND is written: MiniLM's last hidden states, and the tokens that
SmolLM2 goes on with, for each dtype.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from hf_cpu_accel import accelerate_for_cpu, explain, extension

ENCODER_DTYPES = ("float32", "bfloat16", "int8")
DECODER_DTYPES = ("float32", "int8")
NEW_TOKENS = 16


def main(tier: str, given: str, found: str) -> None:
    torch.set_num_threads(1)
    disable_progress_bar()
    assert extension.status().tier == tier, extension.status()
    with safe_open(given, "pt") as file:
        folders = json.loads(file.metadata()["folders"])
        texts, mask, prompt = (file.get_tensor(name) for name in ("texts", "mask", "prompt"))
    results: dict[str, Tensor] = {}
    for dtype in ENCODER_DTYPES:
        with timed(f"encoder {dtype}"):
            results[f"encoder {dtype}"] = encoded(folders["encoder"], dtype, texts, mask)
    for dtype in DECODER_DTYPES:
        with timed(f"decoder {dtype}"):
            results[f"decoder {dtype}"] = continued(folders["decoder"], dtype, prompt)
    save_file(results, found)


@torch.no_grad()
def encoded(folder: str, dtype: str, texts: Tensor, mask: Tensor) -> Tensor:
    """The last hidden states of real tokens, [tokens, features]."""
    model = accelerate_for_cpu(AutoModel.from_pretrained(folder, dtype=torch.float32).eval(), dtype=dtype)
    assert explain(model).kernels == "native"
    return model(texts, attention_mask=mask).last_hidden_state[mask.bool()].float().contiguous()


def continued(folder: str, dtype: str, prompt: Tensor) -> Tensor:
    """The likeliest tokens, one after another, and whatever they are."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    accelerate_for_cpu(model, dtype=dtype)
    assert explain(model).kernels == "native"
    tokens = model.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None)
    return tokens[:, prompt.shape[1] :].contiguous()


@contextmanager
def timed(what: str) -> Iterator[None]:
    start = time.monotonic()
    yield
    print(f"{extension.status().tier} {what} {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
