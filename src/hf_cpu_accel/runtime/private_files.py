"""Files and folders that no other user can have written."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def problem(path: Path) -> str | None:
    """Return why another user may have written the file or folder; None if that is impossible, or it does not exist.

    A symbolic link is a problem, because its owner chooses the target.
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
    """Create the folder and its missing parents for this user only (mode 0700), and return the path.

    Raises:
        OSError: it cannot be created.
    """
    for level in (*reversed(path.parents), path):
        if not level.exists():
            level.mkdir(mode=0o700, exist_ok=True)
    if not path.is_dir():
        raise NotADirectoryError(20, "Not a directory", str(path))
    return path
