"""Folders as GPTQ, AWQ and fp8 tools write them: small models, whose linears `tests.checkpoints.writers` makes."""

from __future__ import annotations

import copy
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.checkpoints.writers import Written, awq, fp8, gptq

Write = Callable[[str, int, int], Written]

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}


def llama(**others: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 160,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    }
    config = hf.LlamaConfig(**sizes | others)
    return hf.LlamaForCausalLM(config).eval()


def bert() -> nn.Module:
    torch.manual_seed(0)
    config = hf.BertConfig(
        vocab_size=160, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    return hf.BertForMaskedLM(config).eval()


def tokens() -> Tensor:
    return torch.randint(1, 160, (2, 9), generator=torch.Generator().manual_seed(1))


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(tokens()).logits
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
    """Write `model` with the linears of its layers quantised; the same model with the weights that they stand for."""
    state = {name: value.to(dtype) for name, value in model.state_dict().items()}
    dense = copy.deepcopy(model)
    for path, module in dense.named_modules():
        if isinstance(module, nn.Linear) and ".layer" in path:
            written = write(path, *module.weight.shape)
            module.weight.data = written.weight.clone()
            del state[f"{path}.weight"]
            state.update({f"{path}.{name}": value for name, value in written.tensors.items()})
    if model.config.tie_word_embeddings:
        state = {
            name: value
            for name, value in state.items()
            if "decoder.weight" not in name and "decoder.bias" not in name
        }
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
