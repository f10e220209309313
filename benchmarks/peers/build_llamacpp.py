"""Build llama.cpp's benchmark and server for this machine, from the sources inside the source distribution of llama-cpp-python."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

_SOURCES = "llama-cpp-python==0.3.36"
_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_SERVER=ON",
)


def sources(folder: Path) -> Path:
    """Return the folder of llama.cpp's sources, with its converter, below a rival's folder."""
    return folder / "llama.cpp"


def program(folder: Path, name: str) -> Path:
    """Return the path of a program, which may not be built."""
    return folder / "llama.cpp-build" / "bin" / name


def build(folder: Path) -> None:
    """Download, configure and compile; some ten minutes on two cores.

    Raises subprocess.CalledProcessError where pip, cmake or the compiler fails.
    """
    with tempfile.TemporaryDirectory() as scratch:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check"]
        subprocess.run(
            [*pip, "--no-deps", "--no-binary", "llama-cpp-python", "-d", scratch, _SOURCES], check=True
        )
        (archive,) = Path(scratch).glob("*.tar.gz")
        with tarfile.open(archive) as package:
            package.extractall(scratch, filter="data")
        (found,) = Path(scratch).glob("*/vendor/llama.cpp")
        shutil.move(found, sources(folder))
    _mend(sources(folder) / "ggml/src/ggml-cpu/amx/mmq.cpp")
    binary = folder / "llama.cpp-build"
    subprocess.run(["cmake", "-S", str(sources(folder)), "-B", str(binary), *_OPTIONS], check=True)
    targets = ["--target", "llama-bench", "llama-quantize", "llama-server"]
    subprocess.run(["cmake", "--build", str(binary), *targets, "-j", "2"], check=True)


def _mend(file: Path) -> None:
    """Load AMX's whole tile configuration. gcc 12 takes its own intrinsic for one that reads the first 8 bytes, and drops
    what fills the rest: llama.cpp then ends in a segmentation fault at the first prompt."""
    text = file.read_text()
    configured = '__asm__ volatile ("ldtilecfg %0" :: "m" (tc));'
    if text.count("_tile_loadconfig(&tc);") != 1:
        raise RuntimeError(f"{file} does not load its tiles as it did in {_SOURCES}")
    file.write_text(text.replace("_tile_loadconfig(&tc);", configured))
