"""GGUF files that something has happened to: each is refused in words, or loaded as the package gguf reads it, or, where that reads
something else, as transformers' own loader does.

`python -m tests.frontends.mutated_gguf --cases 10000` (`make fuzz-files`); `make test` tries a few dozen. A case is a number.
"""

from __future__ import annotations

import random
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from hf_cpu_accel.checkpoints.stored import pack_stored, stored_weight
from hf_cpu_accel.frontends.gguf import load_in_blocks
from hf_cpu_accel.packing.linear import unpack_linear
from tests.frontends.gguf_files import write_file
from tests.mutations import Mutation, append, flip, main, outcome, run_cases, truncate, zero_page

_NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_output": "self_attn.o_proj",
    **{f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"},
    **{f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}


def header_end(content: bytes) -> int:
    """Where the tensors begin, or a little before: names, numbers and places are above."""
    return content.rindex(b"output_norm.weight") + 64


def flip_header(content: bytes, draw: random.Random) -> bytes:
    return flip(content, 0, header_end(content), draw)


def flip_payload(content: bytes, draw: random.Random) -> bytes:
    return flip(content, header_end(content), len(content), draw)


def edit_number(content: bytes, draw: random.Random) -> bytes:
    """A word of the header is another number."""
    place = draw.randrange(0, header_end(content) - 8)
    number = draw.choice((0, 1, 2, 7, 8, 64, 1 << 31, (1 << 32) - 1))
    return content[:place] + number.to_bytes(4, "little") + content[place + 4 :]


def edit_name(content: bytes, draw: random.Random) -> bytes:
    """A tensor or a setting has another name."""
    words = (
        b"attn_q",
        b"attn_k",
        b"ffn_up",
        b"ffn_norm",
        b"token_embd",
        b"head_count",
        b"embedding_length",
        b"llama",
    )
    word = draw.choice([word for word in words if word in content])
    others = [other for other in (*words, b"attn_x", b"ffn_xx") if len(other) == len(word) and other != word]
    other = draw.choice(others) if others else word[::-1]
    places = [at for at in range(header_end(content)) if content.startswith(word, at)]
    place = draw.choice(places)
    return content[:place] + other + content[place + len(word) :]


MUTATIONS: tuple[Mutation, ...] = (
    flip_header,
    flip_payload,
    edit_number,
    edit_name,
    truncate,
    append,
    zero_page,
)


def numbers(model: Any) -> dict[str, Tensor]:
    """All weights, by the names of a plain model; of linears in blocks what would be packed."""
    found = {name: parameter.detach() for name, parameter in model.named_parameters(remove_duplicate=False)}
    for path, module in model.named_modules():
        weight = stored_weight(module)
        if weight is not None and weight.refusal is None:
            found[f"{path}.weight"] = unpack_linear(pack_stored([weight]))
        elif hasattr(module, "ggml_type"):
            from transformers.integrations.gguf.dequant import dequantize

            found[f"{path}.weight"] = dequantize(module.weight.detach(), module.ggml_type)
    return found


def numbers_in(file: Path) -> dict[str, Tensor]:
    """All weights of a llama's file, as the package gguf reads it, with the rows of heads in transformers' order."""
    reader = gguf.GGUFReader(file)
    heads = {
        "q_proj": reader.fields["llama.attention.head_count"].contents(),
        "k_proj": reader.fields["llama.attention.head_count_kv"].contents(),
    }
    found = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        *above, stem, suffix = tensor.name.split(".")
        name = _NAMES[stem]
        for part in (part for part in heads if part in name):
            halves = values.unflatten(0, (heads[part], -1, 2)).transpose(1, 2)
            values = halves.reshape(values.shape)
        found[".".join(["model", *above, name, suffix]).replace("blk", "layers")] = values
    found.setdefault("lm_head.weight", found["model.embed_tokens.weight"])
    return found


def first_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> str | None:
    """The name of a weight that is not what it is to be; where that has infinite values or NaN, nothing is asked of it."""
    for path, values in found.items():
        right = expected[path].float()
        near = torch.allclose(values.float().view(right.shape), right, rtol=1e-5, atol=1e-5, equal_nan=True)
        if not near and torch.isfinite(right).all():
            return path
    return None


def check(folder: Path, name: str, model: Any) -> str:
    """What became of a file that was loaded."""
    found = numbers(model)
    try:
        if first_difference(found, numbers_in(folder / name)) is None:
            return "as gguf reads it"
    except (LookupError, ValueError, RuntimeError):  # what transformers does not look at is damaged
        pass
    wrong = first_difference(found, numbers(AutoModelForCausalLM.from_pretrained(folder, gguf_file=name)))
    return "as transformers reads it" if wrong is None else f"WRONG {wrong}"


def run(cases: int, seed: int = 0) -> tuple[Counter[str], list[str]]:
    """See `run_cases`."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with (
        tempfile.TemporaryDirectory() as name,
        warnings.catch_warnings(),
        pytest.MonkeyPatch.context() as patch,
    ):
        warnings.simplefilter("ignore")
        patch.setenv(
            "HF_DEACTIVATE_ASYNC_LOAD", "1"
        )  # threads that wait for each other, for weights as small as these
        folder = Path(name)
        path = write_file(folder, "llama", num_hidden_layers=1, vocab_size=32)
        content = path.read_bytes()

        def read() -> str:
            model = load_in_blocks(AutoModelForCausalLM.from_pretrained, folder, gguf_file=path.name)
            return check(folder, path.name, model)

        def attempt(draw: random.Random) -> tuple[str, str]:
            mutation = draw.choice(MUTATIONS)
            path.unlink()  # mapped by what was read before
            path.write_bytes(mutation(content, draw))
            return mutation.__name__, outcome(read, (ValueError, OSError), seconds=20)

        return run_cases(attempt, cases, seed, right=("refused", "as"))


if __name__ == "__main__":
    main(run, __doc__)
