"""A disk that starts Debian's Linux with everything in memory: the boot sector (boot.S), and what it reads.

The kernel is decompressed here, which would take the emulator a minute, and the files go with it (initramfs): no disk to wait for,
and no kernel modules. See Linux's Documentation/arch/x86/boot.rst and zero-page.rst.
"""

from __future__ import annotations

import lzma
import struct
from collections.abc import Sequence
from pathlib import Path

from tests.environments.boot_sector import boot_sector

KERNEL, PARAMETERS, FILES = 0x1000000, 0x10000, 0x20000000
MEMORY = 2 << 30
PART = 256 * 512  # what boot.S reads at a time
CYLINDER = 16 * 63 * 512
LARGEST_COMMAND = 2048
# Of Bochs's BIOS: what lies in the first megabyte, and its tables at the end of memory.
FREE_BELOW, ABOVE, TABLES = 0x9F000, 0x100000, 0x10000
FREE, RESERVED = 1, 2


def write_disk(disk: Path, image: Path, command: str, archives: Sequence[Path]) -> None:
    """`image` is Debian's vmlinuz, `command` the kernel's command line, and `archives` become one after another its files."""
    compressed = image.read_bytes()
    size = sum(archive.stat().st_size for archive in archives)
    parts = {
        "PARAMETERS": _parameters(compressed, command, size),
        "KERNEL": _segments(_decompressed(compressed)),
        "FILES": b"".join(archive.read_bytes() for archive in archives),
    }
    with disk.open("wb") as file:
        file.write(_padded(_boot_sector(disk.parent, parts)))
        for part in parts.values():
            file.write(_padded(part))
        file.truncate(-(-file.tell() // CYLINDER) * CYLINDER)


def _padded(part: bytes) -> bytes:
    return part + b"\0" * (-len(part) % PART)


def _boot_sector(folder: Path, parts: dict[str, bytes]) -> bytes:
    values = {"KERNEL": KERNEL, "PARAMETERS": PARAMETERS, "FILES": FILES}
    values |= {f"{name}_PARTS": -(-len(part) // PART) for name, part in parts.items()}
    return boot_sector(Path(__file__).with_name("boot.S"), folder, values)


def _decompressed(image: bytes) -> bytes:
    start = image.find(b"\xfd7zXZ\0")
    if start < 0:
        raise RuntimeError("Debian's kernel is no longer compressed by xz: teach tests/emulated_pc/linux.py")
    return lzma.LZMADecompressor().decompress(image[start:])


def _segments(program: bytes) -> bytes:
    """What an ELF program has in memory from KERNEL on, where it also starts."""
    entry, table = struct.unpack_from("<QQ", program, 24)
    assert entry == KERNEL
    memory = bytearray()
    for number in range(struct.unpack_from("<H", program, 56)[0]):
        kind, _, offset, _, address, size = struct.unpack_from("<IIQQQQ", program, table + 56 * number)
        if kind == 1:  # is loaded
            start = address - KERNEL
            memory.extend(bytes(max(0, start + size - len(memory))))
            memory[start : start + size] = program[offset : offset + size]
    return bytes(memory).rstrip(b"\0")


def _parameters(image: bytes, command: str, size: int) -> bytes:
    """The page of parameters, with the header of the image in it, and the command line behind it."""
    if len(command) >= LARGEST_COMMAND:
        raise RuntimeError(f"the kernel's command line has {len(command)} characters: name fewer checks")
    page = bytearray(4096)
    end = 0x202 + image[0x201]
    page[0x1F1:end] = image[0x1F1:end]
    page[0x210] = 0xFF  # a loader without a number
    struct.pack_into("<III", page, 0x214, KERNEL, FILES, size)
    struct.pack_into("<I", page, 0x228, PARAMETERS + len(page))
    ranges = (
        (0, FREE_BELOW, FREE),
        (FREE_BELOW, ABOVE, RESERVED),
        (ABOVE, MEMORY - TABLES, FREE),
        (MEMORY - TABLES, MEMORY, RESERVED),
    )
    page[0x1E8] = len(ranges)
    for number, (first, last, kind) in enumerate(ranges):
        struct.pack_into("<QQI", page, 0x2D0 + 20 * number, first, last - first, kind)
    return bytes(page) + command.encode() + b"\0"
