"""AMX's tiles in Bochs, an emulator of whole PCs, beside those that the kernels are tested with on machines without AMX.

    python -m tests.amx FOLDER

What simd/tiles.h gives for random tiles must be the same, bit for bit, from the instructions (in Bochs) and from what stands in for
them (emulated_tiles.h, for which this machine needs AVX-512). FOLDER keeps Bochs, which comes from Debian's packages.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path

from tests.environments.debian import unpack

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "src/hf_cpu_accel/csrc"
# Debian 12 has a Bochs without AMX. It asks for SDL when it starts, though there is nothing to show.
SUITE, PACKAGES = "sid", ("bochs", "bochsbios", "vgabios", "libsdl3-0")
SECTOR, FLOPPY = 512, 1_474_560
# No library, and nothing that an operating system would have to set up.
BARE = shlex.split(
    "-DHFCA_BARE -O1 -ffreestanding -fno-exceptions -fno-rtti -fno-pic -mno-red-zone -fno-stack-protector -fcf-protection=none "
    "-fno-asynchronous-unwind-tables -mno-sse -nostdlib -static"
)
EMULATED = shlex.split("-DHFCA_EMULATED_TILES -O2 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni")
LAYOUT = """\
SECTIONS {
  . = 0x10000;
  .all : { *(.text.start) *(.text*) *(.rodata*) *(.data*) *(.bss*) }
  /DISCARD/ : { *(.note*) *(.eh_frame*) *(.comment) }
}
"""
SETTINGS = """\
plugin_ctrl: unmapped=1, biosdev=1
display_library: rfb, options="timeout=0"
romimage: file={bochs}/usr/share/bochs/BIOS-bochs-legacy
vgaromimage: file={bochs}/usr/share/bochs/VGABIOS-lgpl-latest
cpu: model=sapphire_rapids, count=1, ips=50000000, reset_on_triple_fault=0
memory: guest=64, host=64
floppya: 1_44={folder}/floppy, status=inserted
boot: floppy
port_e9_hack: enabled=1
log: {folder}/bochs.log
panic: action=fatal
error: action=report
info: action=report
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder.absolute()
    if "avx512_vnni" not in Path("/proc/cpuinfo").read_text():
        print("tiles are emulated by AVX-512 with VNNI, which this CPU does not have")
        return 2
    bochs = folder / "bochs"
    if not (folder / "unpacked").exists():
        folder.mkdir(parents=True, exist_ok=True)
        unpack(bochs, SUITE, "amd64", PACKAGES)
        (folder / "unpacked").touch()
    instructions, emulated = in_bochs(folder, bochs), here(folder)
    if instructions == emulated and emulated[-1] == "end":
        products = sum(line.startswith(("bytes", "bf16")) for line in emulated)
        print(f"{products} pairs of products: Bochs gives what the emulated tiles give")
        return 0
    for ours, theirs in zip(emulated, instructions, strict=False):
        if ours != theirs:
            print(f"emulated {ours!r}, Bochs {theirs!r}")
    print(f"{len(emulated)} lines emulated, {len(instructions)} from Bochs")
    return 1


def here(folder: Path) -> list[str]:
    """The lines from the emulated tiles."""
    _run("g++", "-std=c++17", f"-I{SOURCES}", *EMULATED, HERE / "products.cpp", "-o", folder / "emulated")
    return _run(folder / "emulated").splitlines()


def in_bochs(folder: Path, bochs: Path) -> list[str]:
    """Those from the instructions."""
    (folder / "layout").write_text(LAYOUT)
    program = folder / "bare.bin"
    _run("g++", "-std=c++17", f"-I{SOURCES}", *BARE, "-c", HERE / "products.cpp", "-o", folder / "bare.o")
    linked = ("-nostdlib", "-static", "--build-id=none", "--no-warn-rwx-segments", "-e", "start")
    _run("ld", *linked, "-T", folder / "layout", "-o", folder / "bare", folder / "bare.o")
    _run("objcopy", "-O", "binary", folder / "bare", program)
    sectors = -(-program.stat().st_size // SECTOR)
    _run("as", f"--defsym=SECTORS={sectors}", "-o", folder / "boot.o", HERE / "boot.S")
    binary = ("-Ttext=0x7c00", "--oformat=binary", "-e", "_start")
    _run("ld", *binary, "-o", folder / "boot.bin", folder / "boot.o")
    floppy = (folder / "boot.bin").read_bytes() + program.read_bytes()
    (folder / "floppy").write_bytes(floppy.ljust(FLOPPY, b"\0"))
    settings = folder / "bochsrc"
    settings.write_text(SETTINGS.format(bochs=bochs, folder=folder))
    own = bochs / "usr/lib/x86_64-linux-gnu"
    libraries = [own, bochs / "lib/x86_64-linux-gnu", own / "pulseaudio"]
    found = os.pathsep.join(map(str, libraries))
    # Its own C library, which is newer than this machine's.
    command = [own / "ld-linux-x86-64.so.2", "--library-path", found, bochs / "usr/bin/bochs-bin"]
    environment = {
        **os.environ,
        "LTDL_LIBRARY_PATH": str(own / "bochs/plugins"),
        "BXSHARE": str(bochs / "usr/share/bochs"),
    }
    output = _run(*command, "-q", "-f", settings, environment=environment, status=1)  # it was switched off
    start, end = (output.find(word) for word in ("bytes ", "end\n"))
    return output[start : end + len("end\n")].splitlines()


def _run(*command: str | Path, environment: dict[str, str] | None = None, status: int = 0) -> str:
    done = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=120,
    )
    if done.returncode != status:
        words = " ".join(map(str, command))
        raise RuntimeError(f"{words} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
