"""Files of tensors in the safetensors format that are mapped instead of read, so that processes share their pages.

Beyond safetensors, the metadata has a SHA-256 of the header (without the hash itself) and a CRC-32 of each tensor, and each tensor
starts at a multiple of 64 bytes, the cache line that a kernel loads. A file that has changed by a single bit raises DamagedFile.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

LINE = 64
_HEADER_HASH, _CHECKSUMS = "header_sha256", "crc32"
_MOST_HEADER = 100_000_000  # bytes, as in safetensors
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_PADDING = "padding."  # the prefix of tensors that only fill lines


class DamagedFile(ValueError):
    """A file is damaged, has changed, or was not written by this package. Nothing of it was loaded."""


@dataclass(frozen=True)
class _Entry:
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int  # in bytes, from the end of the header
    end: int


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> int:
    """Write the file `path` atomically: processes that have it open keep the old file.

    Args:
        tensors: on the CPU; their names must not begin with "padding.".
        metadata: strings by name, as in safetensors.

    Returns:
        The number of bytes.

    Raises:
        ValueError: safetensors does not support a dtype, or a name is reserved.
        OSError: the file cannot be written.
    """
    values = {name: _bytes_of(name, tensor) for name, tensor in tensors.items()}
    header: dict[str, Any] = {"__metadata__": {}}
    end = 0
    for number, (name, tensor) in enumerate(tensors.items()):
        start = -(-end // LINE) * LINE
        if start > end:
            header[f"{_PADDING}{number}"] = _row("U8", (start - end,), end, start)
        end = start + len(values[name])
        header[name] = _row(_NAMES[tensor.dtype], tuple(tensor.shape), start, end)
    sums = {name: _checksum(header[name], content) for name, content in values.items()}
    header["__metadata__"] = {**metadata, _CHECKSUMS: json.dumps(sums), _HEADER_HASH: "0" * 64}
    text = _encoded(header)
    header["__metadata__"][_HEADER_HASH] = hashlib.sha256(text).hexdigest()
    text = _encoded(header)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
        try:
            file.write(text)
            for name, content in values.items():
                start = len(text) + header[name]["data_offsets"][0]
                file.write(bytes(start - file.tell()))
                file.write(content)
            os.fchmod(file.fileno(), 0o644)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
    return len(text) + end


class TensorFile:
    """A mapped file of `write`.

    Attributes:
        path: the file.
        metadata: the metadata of `write`.
    """

    def __init__(self, path: Path) -> None:
        """
        Raises:
            DamagedFile: the header is damaged, or the size is wrong. `check` verifies the tensors.
            OSError: the file cannot be read.
        """
        self.path = path
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                text = _read_header(file.read(8), file, size)
            self._entries, self.metadata = _parse(text, size)
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
            raise self.damaged(error) from error
        self._checksums = self.metadata.pop(_CHECKSUMS)
        self._start = len(text)
        self._mapped = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)

    def damaged(self, reason: object) -> DamagedFile:
        """Return the error to raise for this file."""
        return DamagedFile(
            f"{self.path} cannot be loaded: {reason}. Nothing was loaded; write or download the file again"
        )

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._entries if not name.startswith(_PADDING))

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor as a view of the mapped file, which must not be written to.

        Raises:
            DamagedFile: the file has no such tensor.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise self.damaged(f"it has no tensor {name!r}")
        content = self._mapped[self._start + entry.begin : self._start + entry.end]
        return (
            content.view(entry.dtype).view(entry.shape)
            if len(content)
            else torch.empty(entry.shape, dtype=entry.dtype)
        )

    def check(self) -> None:
        """Verify the checksums of all tensors, on all cores.

        Raises:
            DamagedFile: a checksum is wrong.
        """
        content = self._mapped.numpy().data
        # The largest first, so that the cores finish together. zlib releases the GIL.
        names = sorted(self._entries, key=lambda name: self._entries[name].begin - self._entries[name].end)
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            right = dict(zip(names, pool.map(lambda name: self._is_right(name, content), names), strict=True))
        wrong = [name for name in names if not right[name]]
        if wrong:
            raise self.damaged(f"the content of {wrong[0]!r} has changed since it was written (CRC-32)")

    def _is_right(self, name: str, content: memoryview) -> bool:
        entry = self._entries[name]
        piece = content[self._start + entry.begin : self._start + entry.end]
        if name.startswith(_PADDING):
            return not any(piece)
        row = _row(_NAMES[entry.dtype], entry.shape, entry.begin, entry.end)
        return _checksum(row, piece) == self._checksums.get(name)


def _bytes_of(name: str, tensor: Tensor) -> memoryview:
    if name.startswith(_PADDING) or tensor.dtype not in _NAMES:
        raise ValueError(
            f"{name}: {tensor.dtype} cannot be written; expected one of {', '.join(map(str, _NAMES))}"
        )
    view: memoryview = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return view


def _checksum(row: dict[str, Any], content: memoryview) -> int:
    """Return the CRC-32 of a tensor's dtype, shape and bytes."""
    return zlib.crc32(content, zlib.crc32(f"{row['dtype']} {row['shape']}".encode()))


def _row(dtype: str, shape: tuple[int, ...], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def _encoded(header: dict[str, Any]) -> bytes:
    """Return the bytes of the header: its length, its text, and blanks up to a whole line."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % LINE)
    return len(text).to_bytes(8, "little") + text


def _read_header(prefix: bytes, file: BinaryIO, size: int) -> bytes:
    """Return the bytes before the first tensor."""
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or not 2 <= length <= min(_MOST_HEADER, size - 8):
        raise ValueError(
            f"its header claims {length} of its {size} bytes: it is truncated, or not a safetensors file"
        )
    return prefix + file.read(length)


def _parse(text: bytes, size: int) -> tuple[dict[str, _Entry], dict[str, Any]]:
    """Return the tensors and the metadata of a header in a file of `size` bytes, after verifying its hash."""
    header = json.loads(text[8:])
    metadata = header.pop("__metadata__", None) if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or _HEADER_HASH not in metadata or _CHECKSUMS not in metadata:
        raise ValueError("it has no checksums, so it was not written by hf_cpu_accel")
    stored = metadata.pop(_HEADER_HASH)
    blank = text.replace(str(stored).encode(), b"0" * 64, 1)
    if hashlib.sha256(blank).hexdigest() != stored:
        raise ValueError("its header has changed since it was written (SHA-256)")
    metadata[_CHECKSUMS] = json.loads(metadata[_CHECKSUMS])
    entries = {name: _entry(row) for name, row in header.items()}
    end = 0
    for name, entry in entries.items():
        if entry.begin != end or entry.end - entry.begin != math.prod(entry.shape) * entry.dtype.itemsize:
            raise ValueError(f"the offsets of {name!r} are wrong")
        end = entry.end
    if len(text) + end != size:
        raise ValueError(
            f"it has {size} bytes, but {len(text) + end} were written: it is truncated or extended"
        )
    return entries, metadata


def _entry(row: dict[str, Any]) -> _Entry:
    begin, end = row["data_offsets"]
    shape = tuple(row["shape"])
    if not all(type(number) is int and number >= 0 for number in (begin, end, *shape)):
        raise ValueError(f"{row!r} does not describe a tensor")
    return _Entry(_DTYPES[row["dtype"]], shape, begin, end)
