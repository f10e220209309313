"""Packed files that something has happened to: each is refused in words, or is still what was written.

`python -m tests.packing.mutated_files --cases 10000` (`make fuzz-files`); `make test` tries a few hundred. A case is a number.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hf_cpu_accel.packing.convolution import pack_conv2d
from hf_cpu_accel.packing.linear import FORMS, pack_linear
from hf_cpu_accel.packing.packed_file import PackedModelFile, read_packed, write_packed
from hf_cpu_accel.packing.saved_weight import SavedWeight
from hf_cpu_accel.packing.tensor_file import DamagedFile
from tests.mutations import Mutation, append, flip, main, outcome, run_cases, truncate, zero_page


def write_example(path: Path) -> None:
    """A file with a packed weight of each form, and other tensors."""
    torch.manual_seed(0)
    weights = [
        SavedWeight("linear", (f"layers.{number}.weight",), pack_linear(torch.randn(70, 130), dtype))
        for number, dtype in enumerate(FORMS)
    ]
    for number, (dtype, tiled) in enumerate((("int8", False), ("bfloat16", True), ("float32", True))):
        packed = pack_conv2d(torch.randn(64, 64, 3, 3), dtype, tiled=tiled)
        weights.append(
            SavedWeight("gemm convolution", (f"images.{number}.weight",), packed, torch.randn(0, 64, 3, 3))
        )
    plain = {
        "norm.weight": torch.randn(70),
        "norm.steps": torch.tensor(3),
        "half": torch.randn(5).bfloat16(),
        "none": torch.empty(0, 4),
    }
    write_packed(
        path, weights, plain, {"config": {"dtype": "int8"}, "plan": [["layers.0", "linear", "linear"]]}
    )


def contents(file: PackedModelFile) -> tuple[Any, ...]:
    """All of a file, to be compared."""
    packed = [
        (
            w.rule,
            w.parameters,
            w.packed.dtype,
            w.packed.in_features,
            w.packed.out_features,
            _bytes(w.tensors()),
        )
        for w in file.weights
    ]
    return packed, _bytes(dict(file.plain)), dict(file.about)


def tensors(found: tuple[Any, ...]) -> set[tuple[object, ...]]:
    """(dtype, shape, bytes) of all tensors in `contents`."""
    packed, plain, _ = found
    return {row[1:] for row in (*plain, *(row for weight in packed for row in weight[-1]))}


def _bytes(named: dict[str, torch.Tensor]) -> list[tuple[object, ...]]:
    return [
        (
            name,
            tensor.dtype,
            tensor.shape,
            tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
        )
        for name, tensor in named.items()
    ]


def _header(content: bytes) -> tuple[int, str]:
    length = int.from_bytes(content[:8], "little")
    return 8 + length, content[8 : 8 + length].decode()


def flip_header(content: bytes, draw: random.Random) -> bytes:
    return flip(content, 0, _header(content)[0], draw)


def flip_length(content: bytes, draw: random.Random) -> bytes:
    return flip(content, 0, 8, draw)


def flip_payload(content: bytes, draw: random.Random) -> bytes:
    return flip(content, _header(content)[0], len(content), draw)


def swap_pieces(content: bytes, draw: random.Random) -> bytes:
    """Two pieces of the tensors change places, as where a download is put together in a wrong order."""
    start, size = _header(content)[0], draw.choice((1, 64, 512, 4096))
    first, second = sorted(draw.randrange(start, len(content) - size) for _ in range(2))
    if second < first + size:
        return content
    one, other = content[first : first + size], content[second : second + size]
    return content[:first] + other + content[first + size : second] + one + content[second + size :]


def edit_header(content: bytes, draw: random.Random) -> bytes:
    """A number, dtype or name in the header is another one."""
    end, text = _header(content)
    return _with_header(content, end, _edited(text, draw), False)


def forge_header(content: bytes, draw: random.Random) -> bytes:
    """The same, and the header's hash is made anew: who does that writes another file, of the same tensors."""
    end, text = _header(content)
    return _with_header(content, end, _edited(text, draw), True)


def _edited(text: str, draw: random.Random) -> str:
    words = list(re.finditer(r"\d+|F32|BF16|I8|U8|linear|int8|norm|packed", text))
    word = draw.choice(words)
    other = draw.choice(
        ("0", "1", "7", "64", "99999999999999999999", "-1", "1.5", "F32", "I8", "BF16", "null", "linear")
    )
    return text[: word.start()] + other + text[word.end() :]


def edit_row(content: bytes, draw: random.Random) -> bytes:
    """Shape, dtype or place of one tensor is another's, or turned round; the header's hash is made anew."""
    end, text = _header(content)
    header = json.loads(text)
    names = [name for name in header if name != "__metadata__"]
    name, other = draw.choice(names), draw.choice(names)
    row, key = header[name], draw.choice(("shape", "dtype", "data_offsets"))
    row[key] = draw.choice((header[other][key], row[key][::-1] if key != "dtype" else "U8", [], None))
    return _with_header(content, end, json.dumps(header, separators=(",", ":")), True)


def _with_header(content: bytes, end: int, text: str, rehash: bool) -> bytes:
    encoded = text.rstrip().encode()
    encoded += b" " * (-(8 + len(encoded)) % 64)
    whole = len(encoded).to_bytes(8, "little") + encoded
    if rehash:
        blank = re.sub(rb'("header_sha256":")[0-9a-f]{64}', rb"\g<1>" + b"0" * 64, whole)
        whole = blank.replace(b"0" * 64, hashlib.sha256(blank).hexdigest().encode(), 1)
    return whole + content[end:]


MUTATIONS: tuple[Mutation, ...] = (
    flip_header,
    flip_length,
    flip_payload,
    truncate,
    append,
    swap_pieces,
    zero_page,
    edit_header,
    forge_header,
    edit_row,
)


def run(cases: int, seed: int = 0) -> tuple[Counter[str], list[str]]:
    """See `run_cases`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cpu_accel.safetensors"
        write_example(path)
        content, expected = path.read_bytes(), contents(read_packed(path))

        def read(mutation: Mutation) -> str:
            found = contents(read_packed(path))
            if mutation is forge_header and tensors(found) <= tensors(expected):
                return "other names, same tensors"
            return "unchanged" if found == expected else "WRONG"

        def attempt(draw: random.Random) -> tuple[str, str]:
            mutation = draw.choice(MUTATIONS)
            path.unlink()  # mapped by what was read before
            path.write_bytes(mutation(content, draw))
            return mutation.__name__, outcome(partial(read, mutation), (DamagedFile,), seconds=10)

        return run_cases(attempt, cases, seed, right=("refused", "unchanged", "other"))


if __name__ == "__main__":
    main(run, __doc__)
