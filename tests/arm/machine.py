"""An aarch64 machine in a folder: a cross compiler, an emulator of processes (qemu-user), Python and torch.

All of it comes from Debian's packages, by the sources that this machine has, and from pip's, and is unpacked into the folder.
Nothing is installed. The emulator is that of Debian's development branch, since the one of Debian 12 crashes in torch.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.environments import cuda_stand_ins
from tests.environments.debian import unpack

EMULATOR_SUITE = "sid"
TRIPLET = "aarch64-linux-gnu"
RUNTIME = ("python3-minimal", "libpython3-stdlib", "libstdc++6", "libgomp1", "zlib1g")
# What the checks and the package import, and of torch what it needs without CUDA.
PACKAGES = (
    *("numpy", "psutil", "safetensors", "tqdm"),
    *("pytest", "iniconfig", "pluggy", "packaging", "pygments", "hypothesis", "sortedcontainers", "attrs"),
    *("filelock", "typing-extensions", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "fsspec"),
)
WHEELS = ("manylinux2014_aarch64", *(f"manylinux_2_{glibc}_aarch64" for glibc in (17, 24, 26, 27, 28)))


class Machine:
    """Attributes:
    folder: where it lies; it is filled where it is not.
    compiler: the cross compiler.
    torch: the folder of the aarch64 torch package.
    """

    def __init__(self, folder: Path, torch: str) -> None:
        self.folder = folder
        self._root, self._site = folder / "root", folder / "site"
        self.torch = self._site / "torch"
        # Where an unpacked compiler's own libraries lie. All that is started from here may see them: they are this release's.
        paths = [str(folder / "cross/usr/lib/x86_64-linux-gnu"), os.environ.get("LD_LIBRARY_PATH", "")]
        os.environ["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, paths))
        done = folder / f"{torch}.made"
        if not done.exists():
            folder.mkdir(parents=True, exist_ok=True)
            self._install(torch)
            done.touch()

    @property
    def compiler(self) -> Path:
        installed = shutil.which(f"{TRIPLET}-g++")
        return Path(installed) if installed else _only(self.folder / "cross/usr/bin", f"{TRIPLET}-g++-*")

    def instructions(self, library: Path) -> set[str]:
        """Names of all instructions of an object file."""
        command = [self.compiler.parent / f"{TRIPLET}-objdump", "-d", "--no-show-raw-insn", library]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return set(re.findall(r"^ +[0-9a-f]+:\t(\S+)", text, re.MULTILINE))

    def run(self, arguments: list[str], cpu: str, environment: dict[str, str]) -> int:
        """Python there, with one thread, on a CPU that the emulator knows (`max`, `neoverse-n1`); its exit status."""
        libraries = [self.folder / "stand-ins", *(self._root / part / TRIPLET for part in ("usr/lib", "lib"))]
        variables = {
            "LD_LIBRARY_PATH": os.pathsep.join(map(str, libraries)),
            "PYTHONHOME": str(self._root / "usr"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            # torch's own kernels without SVE, which the emulator is slowest at.
            "ATEN_CPU_CAPABILITY": "default",
            **environment,
        }
        variables["PYTHONPATH"] = os.pathsep.join([environment.get("PYTHONPATH", ""), str(self._site)])
        emulator = [self.folder / "emulator/usr/bin/qemu-aarch64", "-L", self._root, "-cpu", cpu]
        given = [word for name, value in variables.items() for word in ("-E", f"{name}={value}")]
        python = _only(self._root / "usr/bin", "python3.[0-9]*")
        return subprocess.run([*emulator, *given, python, *arguments]).returncode

    def add(self, requirement: str) -> None:
        """Install a package with all that it needs, where that was not done."""
        done = self.folder / f"{requirement}.made"
        if not done.exists():
            self._pip(requirement)
            done.touch()

    def _pip(self, *arguments: str) -> None:
        version = _only(self._root / "usr/bin", "python3.[0-9]*").name.removeprefix("python")
        platforms = [word for name in WHEELS for word in ("--platform", name)]
        pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--upgrade"]
        pip += ["--only-binary=:all:", "--python-version", version, *platforms, "--target", str(self._site)]
        subprocess.run([*pip, *arguments], check=True)

    def _install(self, torch: str) -> None:
        codename = re.search(r"^VERSION_CODENAME=(\w+)", Path("/etc/os-release").read_text(), re.MULTILINE)
        if not codename:
            raise RuntimeError(
                "the emulated machine is made from Debian's packages, so this runs on Debian only"
            )
        unpack(self.folder / "emulator", EMULATOR_SUITE, "amd64", ("qemu-user",))
        unpack(self.folder / "root", codename[1], "arm64", RUNTIME)
        if not shutil.which(f"{TRIPLET}-g++"):
            unpack(self.folder / "cross", codename[1], "amd64", (f"g++-{TRIPLET}",))
            # The one path that is not relative to the compiler.
            script = self.folder / f"cross/usr/{TRIPLET}/lib/libc.so"
            script.write_text(script.read_text().replace(f"/usr/{TRIPLET}", str(script.parents[1])))
        self._pip("--no-deps", torch, *PACKAGES)
        if (self.torch / "lib/libtorch_cuda.so").exists():
            compiler = str(self.compiler).replace("g++", "gcc")
            cuda_stand_ins.make(self.torch, self.folder / "stand-ins", compiler)


def _only(folder: Path, pattern: str) -> Path:
    """The shortest name of those: python3.11 and not python3.11-config."""
    found = sorted(folder.glob(pattern), key=lambda path: (len(path.name), path.name))
    if not found:
        raise RuntimeError(f"{folder} holds no {pattern}: remove {folder.parents[1]} and run this again")
    return found[0]
