"""What an emulated PC writes to its serial port, which is a file."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path


def lines(process: subprocess.Popen[bytes], port: Path, seconds: float) -> Iterator[str]:
    """One after another until the PC is off.

    Raises:
        TimeoutError: it was on for so many seconds.
    """
    end, text, position = time.monotonic() + seconds, "", 0
    while True:
        off = process.poll() is not None  # asked before the file is read, which has the last line then
        if port.exists():
            with port.open("rb") as file:
                file.seek(position)
                new = file.read()
            position += len(new)
            *whole, text = (text + new.decode(errors="replace")).split("\n")
            yield from (line.rstrip("\r") for line in whole)
        if off:
            return
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(1)
