"""Bochs, an emulator of whole PCs, from Debian's packages."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.environments.debian import unpacked

# Debian 12 has a Bochs without AMX. That of the development branch divides 64 bits by a wrong number, at which Linux stops.
SUITE, PACKAGES = "trixie", ("bochs", "bochsbios", "vgabios")
SETTINGS = """\
plugin_ctrl: unmapped=1, biosdev=1
display_library: rfb, options="timeout=0"
romimage: file={share}/BIOS-bochs-latest
vgaromimage: file={share}/VGABIOS-lgpl-latest
cpu: model={cpu}, count=1, ips=50000000, reset_on_triple_fault=0
memory: guest={megabytes}, host={megabytes}
log: {folder}/bochs.log
panic: action=fatal
error: action=report
info: action=report
"""


class Bochs:
    """Its packages in a folder, which also gets the settings and the log of the PC that is on.

    Attributes:
        said: the file with what Bochs has said of that PC.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.said = folder / "bochs.txt"
        self._folder, self._root = folder, unpacked(folder / "bochs", SUITE, "amd64", PACKAGES)

    def start(self, cpu: str, megabytes: int, devices: str) -> subprocess.Popen[bytes]:
        """A PC that is on; its status is 1 when it has been switched off.

        Args:
            cpu: a model that Bochs knows.
            devices: more lines of Bochs's settings.
        """
        share, settings = self._root / "usr/share/bochs", self._folder / "bochsrc"
        form = SETTINGS.format(share=share, cpu=cpu, megabytes=megabytes, folder=self._folder)
        settings.write_text(form + devices)
        own = self._root / "usr/lib/x86_64-linux-gnu"
        libraries = os.pathsep.join(map(str, (own, self._root / "lib/x86_64-linux-gnu", own / "pulseaudio")))
        # Its own C library, which is newer than this machine's may be.
        program = [
            own / "ld-linux-x86-64.so.2",
            "--library-path",
            libraries,
            self._root / "usr/bin/bochs-bin",
        ]
        variables = {"LTDL_LIBRARY_PATH": str(own / "bochs/plugins"), "BXSHARE": str(share)}
        with self.said.open("wb") as said:
            return subprocess.Popen(
                [*program, "-q", "-f", settings],
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
            )
