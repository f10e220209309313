"""Packages of Debian in a folder: nothing is installed, and they may be of another release or architecture than this machine's."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


def unpack(folder: Path, suite: str, architecture: str, packages: Sequence[str]) -> None:
    """Unpack `packages` and all that they need into `folder`, from where this machine gets its own.

    Args:
        suite: the name of a release, or "sid", Debian's development branch.

    Raises:
        RuntimeError: this is no Debian, or apt knows of no package yet.
    """
    if not Path(KEYRING).exists():
        raise RuntimeError("packages of Debian are unpacked here, so this runs on Debian only")
    apt = folder.with_name(f"apt-{folder.name}")
    for part in ("state/lists/partial", "cache/archives/partial"):
        (apt / part).mkdir(parents=True, exist_ok=True)
    (apt / "status").touch()  # nothing is installed
    line = f"deb [arch={architecture} signed-by={KEYRING}] {_source()} {suite} main\n"
    (apt / "sources.list").write_text(line, encoding="utf-8")
    settings = {
        "Dir::Etc::SourceList": apt / "sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::State": apt / "state",
        "Dir::State::Status": apt / "status",
        "Dir::Cache": apt / "cache",
        "APT::Architecture": architecture,
        "APT::Architectures": architecture,
        "APT::Install-Recommends": "false",
        "APT::Sandbox::User": "",
        "Debug::NoLocking": "1",
    }
    command = ["apt-get", "-qq", *(f"-o{key}={value}" for key, value in settings.items())]
    subprocess.run([*command, "update"], check=True)
    subprocess.run([*command, "--yes", "--download-only", "install", *packages], check=True)
    for package in sorted((apt / "cache/archives").glob("*.deb")):
        subprocess.run(["dpkg-deb", "--extract", package, folder], check=True)
    shutil.rmtree(apt)


def unpacked(folder: Path, suite: str, architecture: str, packages: Sequence[str]) -> Path:
    """`folder`, in which `unpack` has put them once."""
    done = folder.with_name(f"{folder.name}.made")
    if not done.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        unpack(folder, suite, architecture, packages)
        done.touch()
    return folder


def _source() -> str:
    """Where this machine gets Debian's packages from."""
    form = "$(REPO_URI) $(ORIGIN) $(LABEL)"
    command = ["apt-get", "indextargets", "--format", form, "Created-By: Packages"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for line in listed.splitlines():
        if line.endswith(" Debian Debian"):
            return line.split()[0]
    raise RuntimeError("apt knows no source of Debian's packages here: run `apt-get update` first")
