"""Archives in the format that Linux unpacks into memory when it starts (initramfs: cpio's `newc`)."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

CONSOLE = os.makedev(5, 1)


class Archive:
    """Writes files under the paths that they have here, and every folder before what lies in it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._folders: set[Path] = set()

    def add(self, path: Path, source: Path | None = None) -> None:
        """The file `source`, by default the one at `path`; a link to a file becomes that file."""
        self.folder(path.parent)
        content = (source or path).read_bytes()
        self._entry(path, stat.S_IFREG | 0o755, content, modified=int((source or path).stat().st_mtime))

    def add_all(self, paths: Iterable[Path]) -> None:
        for path in sorted(set(paths)):
            self.add(path)

    def folder(self, path: Path) -> None:
        if path not in self._folders and path != path.parent:
            self.folder(path.parent)
            self._folders.add(path)
            self._entry(path, stat.S_IFDIR | 0o755)

    def console(self) -> None:
        """The device that the first process writes to."""
        self.folder(Path("/dev"))
        self._entry(Path("/dev/console"), stat.S_IFCHR | 0o600, device=CONSOLE)

    def close(self) -> None:
        self._entry(Path("/TRAILER!!!"), 0)
        self._file.close()

    def _entry(self, path: Path, mode: int, content: bytes = b"", modified: int = 0, device: int = 0) -> None:
        name = str(path).lstrip("/").encode() + b"\0"
        major, minor = os.major(device), os.minor(device)
        # Number, mode, user, group, links, time, size, device of the file system, device that it is, length of the name, checksum.
        fields = (0, mode, 0, 0, 1, modified, len(content), 0, 0, major, minor, len(name), 0)
        self._padded(b"070701" + b"".join(b"%08X" % field for field in fields) + name)
        self._padded(content)

    def _padded(self, content: bytes) -> None:
        self._file.write(content)
        self._file.write(b"\0" * (-len(content) % 4))
