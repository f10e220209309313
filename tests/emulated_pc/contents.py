"""What the disk of the emulated PC holds: Python, torch and what else the checks import, and this source tree.

Every file has the path that it has here, so that nothing needs to be told where another is.
"""

from __future__ import annotations

import compileall
import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.arm.machine import PACKAGES
from tests.emulated_pc.cpio import Archive
from tests.emulated_pc.inside import FILE_SYSTEMS

ROOT = Path(__file__).resolve().parents[2]
# A third of torch is nothing that the checks load, and what takes memory takes time in the emulator.
UNUSED_OF_PACKAGES = re.compile(
    r"torch/(test|include|share)/|torch/bin/(?!torch_shm)|torch/lib/lib(torchbind|aoti|jit|back)|/tests?/|\.pyi$"
)
UNUSED_OF_PYTHON = re.compile(
    r"^(site-packages|test|idlelib|ensurepip|tkinter|lib2to3|turtledemo|distutils|config-)"
    r"|/test/|_tkinter|_test|opt-[12]\.pyc|_codecs_(jp|cn|tw|kr|hk)"
)
PYTHON = Path(sys.executable).resolve()


def archives(folder: Path) -> list[Path]:
    """The files of the disk: those of this machine, which are packed once, and those of this tree."""
    machine, tree = folder / "machine.cpio", folder / "tree.cpio"
    made = folder / f"torch-{importlib.metadata.version('torch')}.made"
    if not made.exists():
        with machine.open("wb") as file:
            archive = Archive(file)
            archive.console()
            for empty in FILE_SYSTEMS:
                archive.folder(Path(empty))
            archive.add_all(_of_this_machine())
            archive.close()
        made.touch()
    for compiled in ("src/hf_cpu_accel", "tests"):
        compileall.compile_dir(ROOT / compiled, quiet=1)
    with tree.open("wb") as file:
        archive = Archive(file)
        archive.add_all(_of_this_tree())
        archive.close()
    return [machine, tree]


def _of_this_machine() -> set[Path]:
    """Python, the packages, and the libraries that these load."""
    files = {PYTHON, *_packages(), *_standard_library()}
    libraries = [path for path in files if re.search(r"\.so(\.|$)", path.name)]
    return files | _needed([PYTHON, *libraries])


def _of_this_tree() -> Iterator[Path]:
    """The package with its kernels, and the tests."""
    for folder in ("src/hf_cpu_accel", "tests", "benchmarks"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".pyc", ".so"):
                yield path


def python_path() -> str:
    folders = {
        str(Path(str(importlib.metadata.distribution(name).locate_file("")))) for name in ("torch", "numpy")
    }
    return os.pathsep.join([str(ROOT / "src"), str(ROOT), *sorted(folders)])


def _packages() -> Iterator[Path]:
    for name in ("torch", *PACKAGES):
        for file in importlib.metadata.distribution(name).files or ():
            path = Path(os.path.normpath(Path(str(file.locate()))))
            if not UNUSED_OF_PACKAGES.search(str(file)) and ".." not in file.parts and path.is_file():
                yield path


def _standard_library() -> Iterator[Path]:
    folder = Path(sysconfig.get_path("stdlib"))
    for path in folder.rglob("*"):
        if not UNUSED_OF_PYTHON.search(str(path.relative_to(folder))) and path.is_file():
            yield path


def _needed(libraries: Iterable[Path]) -> set[Path]:
    """The libraries that those load, and the program that loads them."""
    listed = subprocess.run(["ldd", *map(str, libraries)], capture_output=True, text=True).stdout
    return {Path(os.path.normpath(path)) for path in re.findall(r"(?:=> |\t)(/\S+) \(", listed)}
