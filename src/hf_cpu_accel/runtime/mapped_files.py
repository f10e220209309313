"""Tensors whose memory is unchanged pages of a file, which the system can drop and read again.

Loaders map checkpoints privately (safetensors, `torch.load(mmap=True)`): a page that is written to becomes memory of the process.
Sources: proc(5) on /proc/pid/maps and /proc/pid/stat, and the kernel's Documentation/admin-guide/mm/pagemap.rst.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from torch import Tensor

from hf_cpu_accel.runtime.files import read_text
from hf_cpu_accel.runtime.memory import drop_pages, heap_end

# Begin, end and path of readable private areas. Other processes may write to shared ones.
_AREA = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) r..p \S+ \S+ \d+ +(/.*)$", re.MULTILINE)
_HELD, _OF_FILE = (
    np.uint64(3 << 62),
    np.uint64(1 << 61),
)  # in memory or swapped out; a page of a file, or shared
_BEGINNING = 1 << 16  # the first bytes identify a file; safetensors has its header there


@dataclass(frozen=True)
class _Area:
    """Addresses [begin, end) are mapped from the file at `path`."""

    begin: int
    end: int
    path: str


class SourceFile:
    """A file that tensors are mapped from. It stays open, so that `check` works after it is moved or deleted."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            OSError: the file cannot be read or no longer exists.
        """
        self.path = path
        self._file = path.open("rb", buffering=0)
        self._state = self._state_now()

    def check(self) -> None:
        """Check that the file is unchanged.

        Raises:
            RuntimeError: the file has changed since this object was created.
        """
        if self._state_now() != self._state:
            raise RuntimeError(
                f"the original weights are in {self.path}, which has changed since the model was loaded; load the model again "
                "with from_pretrained"
            )

    def _state_now(self) -> tuple[int, int, bytes]:
        status = os.fstat(self._file.fileno())
        beginning = os.pread(self._file.fileno(), _BEGINNING, 0)
        return status.st_size, status.st_mtime_ns, hashlib.sha256(beginning).digest()


class MappedFiles:
    """The files that are mapped into this process; none if the system does not list them.

    The list is read at its first use. With many libraries it has thousands of lines, which takes milliseconds. So it is not read
    for tensors in the heap, as of small models.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._pagemap = root / "proc/self/pagemap"
        self._maps = root / "proc/self/maps"
        self._heap = _heap_begin(root)
        self._files: dict[str, SourceFile | None] = {}

    @cached_property
    def _areas(self) -> list[_Area]:
        try:
            return list(_areas(self._maps.read_text(errors="surrogateescape")))
        except OSError:
            return []

    @cached_property
    def _begins(self) -> list[int]:
        return [area.begin for area in self._areas]

    def source_of(self, tensor: Tensor) -> SourceFile | None:
        """Return the file that `tensor` is mapped from, if none of its pages was written to; else None."""
        area = self._area_of(tensor)
        if area is None or self._is_written(tensor):
            return None
        if area.path not in self._files:
            self._files[area.path] = _open(area.path)
        return self._files[area.path]

    def give_back(self, tensor: Tensor) -> SourceFile | None:
        """Drop the pages of `tensor` if they belong to a file, and return whether they do. The next use reads them again."""
        file = self.source_of(tensor)
        if file is not None:
            drop_pages(tensor.data_ptr(), tensor.nbytes)
        return file

    def _area_of(self, tensor: Tensor) -> _Area | None:
        if tensor.device.type != "cpu" or not tensor.numel() or not tensor.is_contiguous():
            return None
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        if 0 < self._heap <= begin and end <= heap_end():
            return None
        number = bisect_right(self._begins, begin) - 1
        return None if number < 0 or end > self._areas[number].end else self._areas[number]

    def _is_written(self, tensor: Tensor) -> bool:
        """Return whether some page of `tensor` is memory of the process."""
        first = tensor.data_ptr() // mmap.PAGESIZE
        last = (tensor.data_ptr() + tensor.nbytes - 1) // mmap.PAGESIZE
        try:
            with self._pagemap.open("rb", buffering=0) as file:
                entries = os.pread(file.fileno(), 8 * (last - first + 1), 8 * first)
        except OSError:
            return True
        pages = np.frombuffer(entries, dtype=np.uint64)
        return len(pages) != last - first + 1 or bool(((pages & _HELD != 0) & (pages & _OF_FILE == 0)).any())


def _heap_begin(root: Path) -> int:
    """Return the start of the heap (proc(5): `start_brk` in /proc/pid/stat); 0 if it is unknown."""
    fields = (read_text(root / "proc/self/stat") or "").rpartition(")")[2].split()
    return int(fields[44]) if len(fields) > 44 else 0


def _areas(text: str) -> Iterator[_Area]:
    """Return the mapped files of a text like /proc/self/maps, with adjacent parts of a file merged."""
    last: _Area | None = None
    for begin, end, path in _AREA.findall(text):
        area = _Area(int(begin, 16), int(end, 16), path)
        if last is not None and (last.end, last.path) == (area.begin, area.path):
            area = _Area(last.begin, area.end, path)
        elif last is not None:
            yield last
        last = area
    if last is not None:
        yield last


def _open(path: str) -> SourceFile | None:
    try:
        return SourceFile(Path(path))
    except OSError:
        return None
