"""GPTQ folders that something has happened to: each is refused in words, or loaded as another reader reads it.

`python -m tests.frontends.mutated_gptq --cases 10000` (`make fuzz-files`); `make test` tries a hundred. A case is a number.
"""

from __future__ import annotations

import json
import random
import re
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from hf_cpu_accel.checkpoints.stored import pack_stored, stored_weight
from hf_cpu_accel.checkpoints.stored_linear import StoredLinear
from hf_cpu_accel.frontends.quantized_folders import weights_as_stored
from hf_cpu_accel.packing.linear import unpack_linear
from tests.frontends.quantized_cases import GPTQ, by_activation, llama, write_folder
from tests.mutations import Mutation, append, flip, main, outcome, run_cases, truncate, zero_page
from tests.packing.mutated_files import flip_payload, swap_pieces

NAME = "model.safetensors"
_SETTINGS: dict[str, tuple[Any, ...]] = {
    "bits": (0, 1, 2, 3, 5, 8, 16, -4, "4", None, 4.0, [4]),
    "group_size": (0, 1, 7, 16, 64, 128, -1, -2, 10**9, "32", None, 32.5),
    "checkpoint_format": ("gptq", "gptq_v2", "marlin", "", 7, None),
    "desc_act": (True, False, None, "yes"),
    "dynamic": ({}, {"+:.*": {"bits": 8}}, []),
    "quant_method": ("awq", "fp8", "compressed-tensors"),
}


def write_example(folder: Path) -> None:
    model = llama(num_hidden_layers=1, hidden_size=64, intermediate_size=64, num_key_value_heads=4)
    write_folder(folder, model, GPTQ | {"desc_act": True}, by_activation)


def edit_header(content: bytes, draw: random.Random) -> bytes:
    """A number, dtype or name in the header is another one; its length is made anew, so that tensors stay where they are."""
    length = int.from_bytes(content[:8], "little")
    text = content[8 : 8 + length].decode()
    word = draw.choice(
        list(re.finditer(r"\d+|F32|F16|I32|qweight|qzeros|scales|g_idx|q_proj|norm|embed", text))
    )
    other = draw.choice(
        (
            "0",
            "1",
            "7",
            "64",
            "99999999999999999999",
            "-1",
            "F16",
            "BF16",
            "I32",
            "F32",
            "I64",
            "scales",
            "weight",
            "k_proj",
        )
    )
    header = (text[: word.start()] + other + text[word.end() :]).rstrip().encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + content[8 + length :]


def drop_tensor(content: bytes, draw: random.Random) -> bytes:
    """A tensor has another name: one is missing, and one is too many."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    name = draw.choice([name for name in header if name != "__metadata__"])
    header[f"{name}_old"] = header.pop(name)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


def flip_header(content: bytes, draw: random.Random) -> bytes:
    return flip(content, 0, 8 + int.from_bytes(content[:8], "little"), draw)


MUTATIONS: tuple[Mutation, ...] = (
    flip_header,
    flip_payload,
    truncate,
    append,
    swap_pieces,
    zero_page,
    edit_header,
    drop_tensor,
)


def edit_config(text: str, draw: random.Random) -> str:
    """One of the settings of the quantization is another one."""
    config = json.loads(text)
    name = draw.choice(list(_SETTINGS))
    config["quantization_config"][name] = draw.choice(_SETTINGS[name])
    return json.dumps(config)


def fields(words: np.ndarray, bits: int, count: int) -> Tensor:
    """The first `count` fields of each row, bit by bit."""
    bytes_of_rows = np.ascontiguousarray(words).view(np.uint8)
    spread = np.unpackbits(bytes_of_rows, axis=1, bitorder="little")[:, : count * bits].reshape(
        len(words), count, bits
    )
    return torch.from_numpy((spread * (1 << np.arange(bits))).sum(2).astype(np.int64))


def weight_in(file: dict[str, Tensor], path: str, bits: int, version: int) -> Tensor:
    """The weight of a linear as the format has it."""
    qweight, qzeros, scales, index = (
        file[f"{path}.{name}"] for name in ("qweight", "qzeros", "scales", "g_idx")
    )
    if version == 1:
        qzeros = qzeros + {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}[bits]
    rows, columns = qweight.shape[1], qweight.shape[0] * 32 // bits
    q = fields(qweight.T.contiguous().numpy(), bits, columns)
    zero = fields(qzeros.numpy(), bits, rows)
    index = index.long()
    return ((q - zero.T[:, index]) * scales.T.float()[:, index]).float()


def check(folder: Path, model: Any) -> str:
    """What became of a folder that was loaded."""
    file = load_file(folder / NAME)
    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    version = 2 if (said.get("checkpoint_format") or "gptq") == "gptq_v2" else 1
    for path, module in model.named_modules():
        if isinstance(module, StoredLinear):
            expected = weight_in(file, path, module.layout.bits, version)  # type: ignore[attr-defined]
            weight = stored_weight(module)
            assert weight is not None
            if not torch.equal(module.dequantize(), expected):
                return f"WRONG {path}"
            if weight.refusal is None:
                packed = unpack_linear(pack_stored([weight]))
                order = weight.permutation
                packed = packed if order is None else packed[:, order.argsort()]
                if not torch.allclose(packed, expected, rtol=1e-6, atol=float(expected.abs().max()) * 1e-6):
                    return f"WRONG {path}, packed"
    for name, parameter in model.named_parameters():
        if name in file and not torch.equal(
            parameter.detach().view(torch.uint8), file[name].view(torch.uint8)
        ):
            return f"WRONG {name}"
        if name not in file:
            return f"WRONG {name}: not in the file"
    return "as it is read by others"


def run(cases: int, seed: int = 0) -> tuple[Counter[str], list[str]]:
    """See `run_cases`."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(name)
        write_example(folder)
        path, config = folder / NAME, folder / "config.json"
        content, text = path.read_bytes(), config.read_text()

        def read() -> str:
            with weights_as_stored():
                model = AutoModelForCausalLM.from_pretrained(folder)
            return check(folder, model)

        def attempt(draw: random.Random) -> tuple[str, str]:
            mutation = draw.choice((*MUTATIONS, edit_config))
            path.unlink()  # mapped by what was read before
            path.write_bytes(content if mutation is edit_config else mutation(content, draw))
            config.write_text(edit_config(text, draw) if mutation is edit_config else text)
            return mutation.__name__, outcome(read, (ValueError, OSError), seconds=20)

        return run_cases(attempt, cases, seed, right=("refused", "as"))


if __name__ == "__main__":
    main(run, __doc__)
