"""Tests with other versions than are installed: `python -m tests.environments REQUIREMENT... -- ARGUMENTS of pytest`.

An environment in build/environments/ has them, and sees the rest of the one that runs this. The kernels are not built anew: they
are one binary for every torch.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shlex
import site
import subprocess
import sys
import venv
from pathlib import Path

from packaging.requirements import Requirement

from tests.environments import cuda_stand_ins

ROOT = Path(__file__).resolve().parents[2]
HOSTS = ("transformers", "diffusers", "torch-geometric")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("requirements", nargs="+", help="torch==2.15.0 and the like; `oldest`: of all hosts")
    parser.add_argument("--torch-options", default="", help="of pip, for an index of CPU builds")
    own, rest = sys.argv[1:], []
    if "--" in own:
        own, rest = own[: own.index("--")], own[own.index("--") + 1 :]
    arguments = parser.parse_args(own)
    wanted = [
        version for word in arguments.requirements for version in (oldest() if word == "oldest" else [word])
    ]
    folder = ROOT / "build" / "environments" / "-".join(wanted).replace("==", "-")
    environment = make(folder, wanted, shlex.split(arguments.torch_options))
    return subprocess.run([folder / "bin/python", "-m", "pytest", *rest], env=environment).returncode


def oldest() -> list[str]:
    """The oldest versions of the hosts that this package admits."""
    admitted = [Requirement(line) for line in importlib.metadata.requires("hf_cpu_accel") or ()]
    return sorted(
        {
            f"{requirement.name}=={limit.version}"
            for requirement in admitted
            for limit in requirement.specifier
            if requirement.name in HOSTS and limit.operator == ">="
        }
    )


def make(folder: Path, requirements: list[str], torch_options: list[str]) -> dict[str, str]:
    """The environment with these packages, made where it is not there, and the variables to run its Python with."""
    done = folder / "made"
    if not done.exists():
        venv.create(folder, clear=True, with_pip=True, symlinks=True)
        pip = [folder / "bin/python", "-m", "pip", "--disable-pip-version-check"]
        # Python 3.11 adds an old one, which would be found before that of the other environment.
        subprocess.run([*pip, "uninstall", "-q", "--yes", "setuptools"], check=True)
        packages = _packages(folder)
        # Behind its own: what it has itself is found first, with its metadata.
        lines = "".join(f"import site; site.addsitedir({path!r})\n" for path in site.getsitepackages())
        (packages / "zz_rest.pth").write_text(lines, encoding="utf-8")
        for requirement in requirements:
            # Without what it needs: CUDA's libraries have gigabytes, and everything else is there.
            apart = ["--no-deps", *torch_options] if requirement.startswith("torch==") else []
            subprocess.run([*pip, "install", "-q", *apart, requirement], check=True)
        if (packages / "torch/lib/libtorch_cuda.so").exists():
            cuda_stand_ins.make(packages / "torch", folder / "stand-ins")
        done.touch()
    paths = [str(folder / "stand-ins"), os.environ.get("LD_LIBRARY_PATH")]
    return {
        **os.environ,
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, paths)),
        "PYTHONPATH": os.pathsep.join(map(str, [ROOT / "src", ROOT])),
    }


def _packages(folder: Path) -> Path:
    asked = [folder / "bin/python", "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"]
    return Path(subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip())


if __name__ == "__main__":
    sys.exit(main())
