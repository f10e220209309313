"""Make the environments of the rivals: `python -m benchmarks.peers.setup [NAME ...]`, or the first part of `make bench-peers`."""

from __future__ import annotations

import shlex
import subprocess
import venv
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.peers import build_llamacpp
from hf_cpu_accel.runtime.home_folder import home_folder

_REQUIREMENTS = Path(__file__).parent / "requirements"
NAMES = tuple(sorted(path.stem for path in _REQUIREMENTS.glob("*.txt")))


def folder(name: str) -> Path:
    """Return the folder of a rival's environment, which may not exist."""
    return home_folder() / "peers" / name


def python(name: str) -> Path:
    """Return its interpreter."""
    return folder(name) / "bin" / "python"


def missing(name: str) -> str | None:
    """Return why the rival cannot be started, None if its environment has its current requirements."""
    stamp = _stamp(name)
    if not stamp.exists():
        return f"has no environment; run `python -m benchmarks.peers.setup {name}`"
    if stamp.read_text() != _requirements(name).read_text():
        return f"has an environment of other versions; run `python -m benchmarks.peers.setup {name}`"
    return None


def make(name: str, torch_options: str = "") -> None:
    """Create or renew one environment. Raises subprocess.CalledProcessError where pip or a compiler fails.

    Args:
        name: one of `NAMES`.
        torch_options: options of pip for torch alone, e.g. "--index-url ..." of the CPU builds.
    """
    venv.create(folder(name), with_pip=True, clear=True)
    requirements = _requirements(name)
    torch = next(line for line in requirements.read_text().splitlines() if line.startswith("torch=="))
    pip = [str(python(name)), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, torch, *shlex.split(torch_options)], check=True)
    subprocess.run([*pip, "-r", str(requirements)], check=True)
    if name == "optimum-intel":
        # It asks for torchvision. That of the package index does not load beside a CPU build of torch, and transformers
        # imports it wherever it finds one.
        subprocess.run([*pip[:3], "uninstall", "-q", "-y", "torchvision"], check=True)
    if name == "llamacpp":
        build_llamacpp.build(folder(name))
    _stamp(name).write_text(
        requirements.read_text()
    )  # last: an interrupted setup is not taken for a whole one


def main(
    names: Annotated[list[str] | None, typer.Argument(help=f"[default: {' '.join(NAMES)}]")] = None,
    torch_options: Annotated[str, typer.Option(help="Options of pip for torch, such as an index.")] = "",
) -> None:
    """Make the missing environments; exit with 1, after trying all, if one could not be made."""
    unknown = [name for name in names or () if name not in NAMES]
    if unknown:
        raise typer.BadParameter(f"{unknown} are not known; accepted: {', '.join(NAMES)}")
    failed = False
    for name in names or NAMES:
        reason = missing(name)
        if reason is None:
            continue
        typer.echo(f"making {python(name).parents[1]}")
        try:
            make(name, torch_options)
        except subprocess.CalledProcessError as error:
            failed = True
            typer.echo(
                f"{name}: {error.cmd[0]} ended with code {error.returncode}; its table rows will say so",
                err=True,
            )
    raise typer.Exit(1 if failed else 0)


def _requirements(name: str) -> Path:
    return _REQUIREMENTS / f"{name}.txt"


def _stamp(name: str) -> Path:
    return folder(name) / "requirements.txt"


if __name__ == "__main__":
    typer.run(main)
