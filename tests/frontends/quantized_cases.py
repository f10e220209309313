"""Folders as GPTQ, AWQ and fp8 tools write them: small models, whose linears `tests.checkpoints.writers` makes."""

from __future__ import annotations

import copy
import json
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tests.checkpoints.writers import Written, awq, fp8, gptq

Write = Callable[[str, int, int], Written]

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}


SIZES = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def llama(**others: Any) -> nn.Module:
    torch.manual_seed(0)
    config = hf.LlamaConfig(**SIZES | others)
    return hf.LlamaForCausalLM(config).eval()


def bert() -> nn.Module:
    torch.manual_seed(0)
    config = hf.BertConfig(
        vocab_size=160, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    return hf.BertForMaskedLM(config).eval()


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = hf.GPT2Config(vocab_size=160, n_embd=64, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=1)
    return hf.GPT2LMHeadModel(config).eval()


def t5() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
    return hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=160, decoder_start_token_id=0, **sizes)
    ).eval()


def tokens() -> Tensor:
    return torch.randint(1, 160, (2, 9), generator=torch.Generator().manual_seed(1))


def logits(model: Any) -> Tensor:
    others = {"decoder_input_ids": tokens()} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        found: Tensor = model(tokens(), **others).logits
        return found


def seed_of(path: str) -> int:
    return zlib.crc32(path.encode())


def by_activation(path: str, rows: int, columns: int) -> Written:
    """Linears that share an input share the order of its features."""
    owner = path.rpartition(".")[0].replace("o_proj", "") + (
        "o" if path.endswith(("o_proj", "down_proj")) else ""
    )
    generator = torch.Generator().manual_seed(seed_of(owner))
    index = (torch.arange(columns) // 32)[torch.randperm(columns, generator=generator)]
    return gptq(rows, columns, index=index, seed=seed_of(path))


FORMS: dict[str, tuple[dict[str, Any], Write]] = {
    "gptq": (GPTQ, lambda path, rows, columns: gptq(rows, columns, seed=seed_of(path))),
    "gptq-v2-8bits": (
        GPTQ | {"bits": 8, "checkpoint_format": "gptq_v2", "group_size": -1},
        lambda path, rows, columns: gptq(rows, columns, bits=8, group=-1, version=2, seed=seed_of(path)),
    ),
    "gptq-by-activation": (GPTQ | {"desc_act": True}, by_activation),
    "awq-gemm": (
        AWQ | {"version": "gemm"},
        lambda path, rows, columns: awq(rows, columns, seed=seed_of(path)),
    ),
    "awq-gemv": (
        AWQ | {"version": "gemv"},
        lambda path, rows, columns: awq(rows, columns, gemv=True, seed=seed_of(path)),
    ),
    "fp8": (FP8, lambda path, rows, columns: fp8(rows, columns, block=(32, 32), seed=seed_of(path))),
}


def write_folder(
    folder: Path,
    model: nn.Module,
    config: dict[str, Any],
    write: Write,
    *,
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """Write `model` with the linears of its layers quantized; the same model with the weights that they stand for."""
    state = {name: value.to(dtype) for name, value in model.state_dict().items()}
    dense = copy.deepcopy(model)
    for path, module in dense.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and re.search(r"\.\d+\.", path):
            turned = isinstance(module, Conv1D)
            written = write(path, *(module.weight.shape[::-1] if turned else module.weight.shape))
            module.weight.data = written.weight.T.clone() if turned else written.weight.clone()
            del state[f"{path}.weight"]
            state.update({f"{path}.{name}": value for name, value in written.tensors.items()})
    state = {name: value for name, value in state.items() if name not in model.all_tied_weights_keys}
    folder.mkdir(exist_ok=True)
    save_file(
        {name: value.contiguous().clone() for name, value in state.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    said = model.config.to_dict() | {
        "architectures": [type(model).__name__],
        "dtype": str(dtype).removeprefix("torch."),
        "quantization_config": config,
    }
    (folder / "config.json").write_text(json.dumps(said))
    return dense.to(dtype).float()


def write_form(folder: Path, form: str, **options: Any) -> nn.Module:
    """A Llama of one of FORMS."""
    return write_folder(folder, llama(), *FORMS[form], **options)
