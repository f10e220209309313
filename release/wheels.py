"""`make wheels`: the source distribution of a commit, and from it a wheel for each architecture, in dist/.

The wheels are as portable as their name says, which auditwheel holds: glibc 2.28, libstdc++ of gcc 8, Python from 3.10 on. gcc
makes them, and no compiler that brings libc++ (zig): ops refuse arguments by exceptions that pass through torch, and torch's
libstdc++ ends the process when one of another runtime arrives.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GLIBC = 28  # 2.28, in the names of the wheels
COMPILERS = {"x86_64": "x86_64-linux-gnu-g++", "aarch64": "aarch64-linux-gnu-g++"}
LARGEST = 20 << 20  # bytes of a wheel
# torch's own library is found where torch is; everything else comes with every Linux.
FROM_TORCH = "libtorch_cpu.so"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--commit", default="HEAD")
    parser.add_argument(
        "--torch", type=Path, required=True, help="the folder of an installed torch, for its headers"
    )
    parser.add_argument("--machines", nargs="+", choices=list(COMPILERS), default=list(COMPILERS))
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "wheels", help="emptied first")
    parser.add_argument("--into", type=Path, default=ROOT / "dist")
    arguments = parser.parse_args()
    missing = [COMPILERS[name] for name in arguments.machines if shutil.which(COMPILERS[name]) is None]
    if missing:
        parser.error(
            f"{' and '.join(missing)} not found; on Debian: apt-get install g++ g++-aarch64-linux-gnu"
        )
    work, into = arguments.work.resolve(), arguments.into.resolve()
    shutil.rmtree(work, ignore_errors=True)
    into.mkdir(parents=True, exist_ok=True)
    os.umask(0o022)  # the modes of the files are in the packages
    seconds = _git("log", "-1", "--format=%ct", arguments.commit)
    archive = source_distribution(arguments.commit, work / "source", into, int(seconds))
    made = [archive]
    for machine in arguments.machines:
        with tarfile.open(archive) as packed:
            packed.extractall(work / machine, filter="data")
        (source,) = (work / machine).iterdir()
        made.append(wheel(machine, source, into, arguments.torch.resolve(), seconds))
    _run([sys.executable, "-m", "twine", "check", "--strict", *made])
    for path in made:
        print(f"{path.stat().st_size / 1e6:6.2f} MB  {path}")


def source_distribution(commit: str, source: Path, into: Path, seconds: int) -> Path:
    """What setuptools makes of the commit, with the commit's time on all files."""
    source.mkdir(parents=True)
    exported = subprocess.run(
        ["git", "-c", "tar.umask=0022", "archive", commit], cwd=ROOT, check=True, capture_output=True
    ).stdout
    subprocess.run(["tar", "-x"], cwd=source, check=True, input=exported)
    _build(["--sdist", "--outdir", source / "made", source], {})
    (made,) = (source / "made").iterdir()
    with (
        tarfile.open(made) as packed,
        open(into / made.name, "wb") as raw,
        gzip.GzipFile("", "wb", mtime=seconds, fileobj=raw) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as written,
    ):
        for member in sorted(packed.getmembers(), key=lambda member: member.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = seconds, 0, 0, "", ""
            member.pax_headers = {}
            written.addfile(member, packed.extractfile(member) if member.isfile() else None)
    return into / made.name


def wheel(machine: str, source: Path, into: Path, torch: Path, seconds: str) -> Path:
    """The wheel of an unpacked source distribution for one architecture, named for the systems that it runs on.

    Raises:
        subprocess.CalledProcessError: it does not compile.
        ValueError: as `check`.
    """
    environment = {
        "CXX": COMPILERS[machine],
        "LDFLAGS": "-s",
        "HF_CPU_ACCEL_REQUIRE_EXTENSION": "1",
        "HF_CPU_ACCEL_TIERS": "all",
        "HF_CPU_ACCEL_TORCH_ROOT": str(torch),
        "SOURCE_DATE_EPOCH": seconds,
    }
    options = f"--config-setting=--build-option=--plat-name=manylinux_2_{GLIBC}_{machine}"
    _build(["--wheel", options, "--outdir", source / "made", source], environment)
    (made,) = (source / "made").iterdir()
    check(made)
    return Path(shutil.copy(made, into))


def check(wheel: Path) -> None:
    """Whether a wheel runs where its name says that it does.

    Raises:
        ValueError: it asks for a newer system, for libraries that are neither every system's nor torch's, or for a lot of disk.
    """
    shown = subprocess.run(
        [sys.executable, "-m", "auditwheel", "show", "--json", wheel], check=True, stdout=subprocess.PIPE
    )
    found = json.loads(shown.stdout)
    named = re.match(r"manylinux_2_(\d+)_", found["sym_tag"])
    others = set(found["external_libs"]) - {FROM_TORCH}
    size = wheel.stat().st_size
    problems = [
        "" if named and int(named[1]) <= GLIBC else f"its symbols are those of {found['versioned_symbols']}",
        f"it needs {', '.join(sorted(others))}" if others else "",
        "it needs a CPU above the baseline" if found["unsupported_isa"] else "",
        f"it has {size} bytes, expected {LARGEST} at most" if size > LARGEST else "",
    ]
    if any(problems):
        raise ValueError(f"{wheel.name}: {'; '.join(filter(None, problems))}")


def _build(arguments: list[str | Path], environment: dict[str, str]) -> None:
    _run([sys.executable, "-m", "build", "--no-isolation", *arguments], environment)


def _run(command: list[str | Path], environment: dict[str, str] | None = None) -> None:
    subprocess.run(command, check=True, env={**os.environ, **(environment or {})})


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


if __name__ == "__main__":
    main()
