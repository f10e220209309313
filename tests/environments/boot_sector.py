"""The first sector of a disk, which a BIOS loads to 0x7c00 and starts."""

from __future__ import annotations

import subprocess
from pathlib import Path


def boot_sector(source: Path, folder: Path, values: dict[str, int]) -> bytes:
    """Its 512 bytes, from an assembler file that may include those beside this one.

    Args:
        folder: for what is made on the way.
        values: of the symbols that the file leaves open.
    """
    assembled, linked = folder / "boot.o", folder / "boot.bin"
    defined = [f"--defsym={name}={value}" for name, value in values.items()]
    subprocess.run(["as", "-I", Path(__file__).parent, *defined, "-o", assembled, source], check=True)
    binary = ("-Ttext=0x7c00", "--oformat=binary", "-e", "_start")
    subprocess.run(["ld", *binary, "-o", linked, assembled], check=True)
    return linked.read_bytes()
