"""Files and folders that no other user can have written: what is read from there decides what runs, and some of it is code."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def problem(path: Path) -> str | None:
    """Why another user may have written the file or folder; None if none can have, or it is not there.

    A symbolic link is a problem: who made it chose what it leads to.
    """
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    if stat.S_ISLNK(status.st_mode):
        return "it is a symbolic link"
    if status.st_uid != os.geteuid():
        return f"it belongs to user {status.st_uid}, not to user {os.geteuid()}, who runs this process"
    if status.st_mode & _OTHERS_WRITE:
        return f"other users can write to it (mode {stat.S_IMODE(status.st_mode):o})"
    return None


def make_folder(path: Path) -> Path:
    """Create the folder, and what is missing above it, for this user alone (mode 0700). Returns the path.

    Raises:
        OSError: it cannot be created.
    """
    for level in (*reversed(path.parents), path):
        if not level.exists():
            level.mkdir(mode=0o700, exist_ok=True)
    if not path.is_dir():
        raise NotADirectoryError(20, "Not a directory", str(path))
    return path
