"""AMX's tiles in Bochs, an emulator of whole PCs, beside those that the kernels are tested with on machines without AMX.

    python -m tests.amx FOLDER

What simd/tiles.h gives for random tiles must be the same, bit for bit, from the instructions (in Bochs) and from what stands in for
them (emulated_tiles.h, for which this machine needs AVX-512). FOLDER keeps Bochs, which comes from Debian's packages.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

from tests.environments.bochs import Bochs
from tests.environments.boot_sector import boot_sector

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "src/hf_cpu_accel/csrc"
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
DEVICES = """\
floppya: 1_44={folder}/floppy, status=inserted
boot: floppy
port_e9_hack: enabled=1
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder.absolute()
    if "avx512_vnni" not in Path("/proc/cpuinfo").read_text():
        print("tiles are emulated by AVX-512 with VNNI, which this CPU does not have")
        return 2
    instructions, emulated = in_bochs(folder, Bochs(folder)), here(folder)
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


def in_bochs(folder: Path, bochs: Bochs) -> list[str]:
    """Those from the instructions."""
    (folder / "layout").write_text(LAYOUT)
    program = folder / "bare.bin"
    _run("g++", "-std=c++17", f"-I{SOURCES}", *BARE, "-c", HERE / "products.cpp", "-o", folder / "bare.o")
    linked = ("-nostdlib", "-static", "--build-id=none", "--no-warn-rwx-segments", "-e", "start")
    _run("ld", *linked, "-T", folder / "layout", "-o", folder / "bare", folder / "bare.o")
    _run("objcopy", "-O", "binary", folder / "bare", program)
    sectors = -(-program.stat().st_size // SECTOR)
    boot = boot_sector(HERE / "boot.S", folder, {"SECTORS": sectors})
    (folder / "floppy").write_bytes((boot + program.read_bytes()).ljust(FLOPPY, b"\0"))
    process = bochs.start("sapphire_rapids", 64, DEVICES.format(folder=folder))
    try:
        process.wait(timeout=120)
    finally:
        process.kill()
    output = bochs.said.read_text(errors="replace")
    if process.returncode != 1:  # it was not switched off
        raise RuntimeError(f"Bochs ended with {process.returncode}\n{output}")
    start, end = (output.find(word) for word in ("bytes ", "end\n"))
    return output[start : end + len("end\n")].splitlines()


def _run(*command: str | Path) -> str:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=120
    )
    if done.returncode:
        words = " ".join(map(str, command))
        raise RuntimeError(f"{words} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
