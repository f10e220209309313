"""Storage of the original weights for `restore`, where packing loses information.

Weights that are mapped from their file and unchanged stay there: nothing is written, and their pages are released.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, Protocol

import torch
from torch import Tensor

from hf_cpu_accel.runtime.fork import new_lock
from hf_cpu_accel.runtime.home_folder import home_folder
from hf_cpu_accel.runtime.mapped_files import MappedFiles, SourceFile
from hf_cpu_accel.runtime.private_files import make_folder


class Ticket:
    """The place of a tensor in a store: byte offset, shape and dtype, or its number among tensors mapped from files."""

    def __init__(
        self, offset: int, shape: torch.Size, dtype: torch.dtype, *, is_mapped: bool = False
    ) -> None:
        self.offset = offset
        self.shape = shape
        self.dtype = dtype
        self.is_mapped = is_mapped


class OriginalsStore(Protocol):
    def put(self, tensor: Tensor) -> Ticket:
        """Store the values of `tensor`."""

    def get(self, ticket: Ticket) -> Tensor:
        """Return the stored values."""

    def give_back(self, tensor: Tensor) -> object:
        """Release the pages of `tensor`, which is not stored, if it is mapped from a file."""

    def check(self) -> None:
        """Raise a RuntimeError if `get` would."""

    def commit(self) -> None:
        """Finish a rewrite that succeeded."""


class _Store:
    """Base class of stores: the files that tensors may be mapped from."""

    def __init__(self, mapped: MappedFiles | None = None) -> None:
        self._mapped = mapped

    def give_back(self, tensor: Tensor) -> SourceFile | None:
        """Release the pages of `tensor` if they belong to a file, and return the file."""
        return None if self._mapped is None else self._mapped.give_back(tensor)


class DiskStore(_Store):
    """An append-only file without a name: it is deleted with the last reference, also if the process is killed.

    It is not in the temporary folder of the system, which is in memory on many machines. Deep copies share the file, since its
    contents never change. Pickles do not include it, since an accelerated model is pickled to serve it, not to restore it.
    """

    def __init__(self, directory: Path, mapped: MappedFiles | None = None) -> None:
        super().__init__(mapped)
        self.directory = directory
        self._lock = new_lock()
        self._file: BinaryIO | None = None
        self._end = 0
        self._in_files: list[Tensor] = []
        self._sources: set[SourceFile] = set()
        self._is_left_behind = False

    def reserve(self, nbytes: int) -> None:
        """Create the folder and check that `nbytes` fit.

        Raises:
            OSError: the folder is not writable, or the disk is too full.
        """
        try:
            make_folder(self.directory)
            free = shutil.disk_usage(self.directory).free
        except OSError as error:
            raise self._failure(error) from error
        if free < nbytes:
            raise self._failure(f"{nbytes / 1e6:.0f} MB needed, {free / 1e6:.0f} MB free")

    def put(self, tensor: Tensor) -> Ticket:
        """Write the values of `tensor`, unless a file has them.

        Raises:
            OSError: the write failed.
        """
        source = self.give_back(tensor)
        if source is not None:
            with self._lock:
                self._sources.add(source)
                self._in_files.append(tensor.detach())
                return Ticket(len(self._in_files) - 1, tensor.shape, tensor.dtype, is_mapped=True)
        values = tensor.detach().contiguous()
        view = values.reshape(-1).view(torch.uint8).numpy().data
        with self._lock:
            try:
                if self._file is None:
                    make_folder(self.directory)
                    self._file = tempfile.TemporaryFile(dir=self.directory, buffering=0)  # noqa: SIM115 (outlives us)
                written = 0
                while written < len(view):
                    written += os.pwrite(self._file.fileno(), view[written:], self._end + written)
            except OSError as error:
                raise self._failure(error) from error
            ticket = Ticket(self._end, values.shape, values.dtype)
            self._end += len(view)
        return ticket

    def check(self) -> None:
        """Check that the values can be read.

        Raises:
            RuntimeError: the store was pickled, or the file of the model has changed.
        """
        if self._is_left_behind:
            raise RuntimeError(
                "a pickled model does not include its original weights: load it again with from_pretrained"
            )
        for source in self._sources:
            source.check()

    def get(self, ticket: Ticket) -> Tensor:
        """Return the values, in a new tensor or mapped from their file.

        Raises:
            RuntimeError: as `check`.
        """
        self.check()
        if ticket.is_mapped:
            return self._in_files[ticket.offset]
        assert self._file is not None
        values = torch.empty(ticket.shape, dtype=ticket.dtype)
        view = values.reshape(-1).view(torch.uint8).numpy().data
        read = 0
        while read < len(view):
            count = os.preadv(self._file.fileno(), [view[read:]], ticket.offset + read)
            if count == 0:
                raise OSError(
                    f"the file of original weights in {self.directory} ends at {ticket.offset + read} bytes"
                )
            read += count
        return values

    def commit(self) -> None:
        """Do nothing: the file stays until the model is restored or deleted."""

    def __deepcopy__(self, memo: dict[int, object]) -> DiskStore:
        return self

    def __getstate__(self) -> dict[str, object]:
        return {"directory": self.directory}

    def __setstate__(self, state: dict[str, Path]) -> None:
        self.__init__(state["directory"])  # type: ignore[misc]
        self._is_left_behind = True

    def _failure(self, reason: OSError | str) -> OSError:
        return OSError(
            f"cannot store the original weights in {self.directory}: {reason}. "
            "Set HF_CPU_ACCEL_HOME to a folder with more space, or pass originals='memory' or originals='drop'."
        )


class DroppedStore(_Store):
    """A store that keeps values in memory during the rewrite, to undo a failure, and drops them afterward, so that `restore`
    raises."""

    def __init__(self, mapped: MappedFiles | None = None) -> None:
        super().__init__(mapped)
        self._values: list[Tensor] | None = []

    def put(self, tensor: Tensor) -> Ticket:
        assert self._values is not None
        self.give_back(tensor)
        self._values.append(tensor.detach())
        return Ticket(len(self._values) - 1, tensor.shape, tensor.dtype)

    def get(self, ticket: Ticket) -> Tensor:
        self.check()
        assert self._values is not None
        return self._values[ticket.offset]

    def commit(self) -> None:
        self._values = None

    def check(self) -> None:
        if self._values is None:
            raise RuntimeError(self.refusal())

    def refusal(self) -> str:
        """Return why there are no originals, and the remedy."""
        return (
            "this model was accelerated with originals='drop', so its original weights are not stored: load it again with "
            "from_pretrained, and accelerate it with originals='disk'"
        )


class NoStore(DroppedStore):
    """A store without originals: packed weights came from the file at `path`. Only weights that packing does not round can be
    restored."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def refusal(self) -> str:
        return (
            f"{self.path} has packed weights only, without the original ones: to restore them, or to "
            "accelerate with other settings, load the checkpoint that was packed"
        )


def make_store(originals: str, tensors: Iterable[Tensor]) -> OriginalsStore:
    """Return the store for `originals`: `"disk"`, `"memory"` (weights are never freed, so nothing is stored) or `"drop"`.

    `tensors` are those that may be stored: a disk that cannot hold those that are in no file raises before anything is changed.
    """
    mapped = MappedFiles()
    if originals == "drop":
        return DroppedStore(mapped)
    store = DiskStore(home_folder() / "originals", mapped)
    nbytes = sum(tensor.nbytes for tensor in tensors if mapped.source_of(tensor) is None)
    if originals == "disk" and nbytes:
        store.reserve(nbytes)
    return store
