"""Bochs, an emulator of whole PCs, from Debian's packages."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.emulated_pc.linux import MEMORY
from tests.environments.debian import unpack

# Not the 3.1 of Debian's development branch, which tests.amx has: its compiler made idiv of 64 bits wrong, and Linux stops at once.
SUITE, PACKAGES = "trixie", ("bochs", "bochsbios", "vgabios")
SETTINGS = """\
plugin_ctrl: unmapped=1, biosdev=1
display_library: rfb, options="timeout=0"
romimage: file={share}/BIOS-bochs-latest
vgaromimage: file={share}/VGABIOS-lgpl-latest
cpu: model={model}, count=1, ips=50000000, reset_on_triple_fault=0
clock: sync=none
memory: guest={memory}, host={memory}
ata0: enabled=1, ioaddr1=0x1f0, ioaddr2=0x3f0, irq=14
ata0-master: type=disk, path={disk}, mode=flat
boot: disk
com1: enabled=1, mode=file, dev={output}
log: {folder}/bochs.log
panic: action=fatal
error: action=report
info: action=report
"""


class Bochs:
    def __init__(self, folder: Path) -> None:
        self._folder, self._root = folder, folder / "bochs"
        if not (folder / "bochs.made").exists():
            unpack(self._root, SUITE, "amd64", PACKAGES)
            (folder / "bochs.made").touch()

    def run(self, model: str, disk: Path, seconds: float) -> Iterator[str]:
        """The lines that a PC with that CPU writes to its serial port until it is off.

        Raises:
            TimeoutError: it was on for so many seconds.
        """
        output, settings = self._folder / "serial", self._folder / "bochsrc"
        for file in (output, disk.with_name(f"{disk.name}.lock")):  # a run that was killed leaves its lock
            file.unlink(missing_ok=True)
        share = self._root / "usr/share/bochs"
        settings.write_text(
            SETTINGS.format(
                share=share, model=model, memory=MEMORY >> 20, disk=disk, output=output, folder=self._folder
            )
        )
        own = self._root / "usr/lib/x86_64-linux-gnu"
        libraries = os.pathsep.join(map(str, (own, self._root / "lib/x86_64-linux-gnu", own / "pulseaudio")))
        # Its own C library, which is newer than this machine's may be.
        command = [
            own / "ld-linux-x86-64.so.2",
            "--library-path",
            libraries,
            self._root / "usr/bin/bochs-bin",
        ]
        variables = {"LTDL_LIBRARY_PATH": str(own / "bochs/plugins"), "BXSHARE": str(share)}
        with (self._folder / "bochs.txt").open("wb") as said:
            process = subprocess.Popen(
                [*command, "-q", "-f", settings],
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
            )
        try:
            yield from _lines(process, output, time.monotonic() + seconds)
        finally:
            process.kill()
            process.wait()


def _lines(process: subprocess.Popen[bytes], output: Path, end: float) -> Iterator[str]:
    text, position = "", 0
    while True:
        off = (
            process.poll() is not None
        )  # before what it wrote is read, the last of which would be missed otherwise
        if output.exists():
            with output.open("rb") as file:
                file.seek(position)
                new = file.read()
            position += len(new)
            *lines, text = (text + new.decode(errors="replace")).split("\n")
            yield from (line.rstrip("\r") for line in lines)
        if off:
            return
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(1)
