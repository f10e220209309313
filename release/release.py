"""`make release`: check, build and try the packages of the last commit. `make release TAG=1` also tags it, and never pushes.

The version is the one in pyproject.toml. Without TAG=1 this is a dry run, which leaves packages in dist/ and no tag.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


class ReleaseError(Exception):
    """A check failed; the message says what to do."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tag", action="store_true", help="tag the commit when all checks have passed")
    arguments = parser.parse_args()
    try:
        release(ROOT, tag=arguments.tag, make=_make)
    except ReleaseError as error:
        raise SystemExit(f"release: {error}") from error
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"release: `{' '.join(map(str, error.cmd))}` failed") from error


def release(root: Path, *, tag: bool, make: Callable[[Path, str], None]) -> None:
    """Check the tree, make the packages of its last commit, try them, and tag that commit if `tag` says so.

    Args:
        root: the clone.
        tag: False for a dry run.
        make: runs a target of the Makefile; "wheels" puts the packages into dist/.

    Raises:
        ReleaseError: a check failed. No tag was made.
        subprocess.CalledProcessError: a target failed. No tag was made.
    """
    version, commit = project_version(root), _git(root, "rev-parse", "HEAD")
    name = f"v{version}"
    _step(f"{'release' if tag else 'dry run of the release'} of {version}, commit {commit[:12]}")
    check_tree(root)
    check_changelog(root, version)
    check_tag(root, name, commit)
    _step("remove the packages of earlier builds from dist/")
    for path in sorted((root / "dist").glob("hf_cpu_accel-*")):
        print(f"removed dist/{path.name}")
        path.unlink()
    _step("make wheels: source distribution and wheels, with twine and auditwheel")
    make(root, "wheels")
    check_packages(root, version)
    _step("make test-wheels: the wheel of this machine in a new environment")
    make(root, "test-wheels")
    check_tree(root)
    if _git(root, "rev-parse", "HEAD") != commit:
        raise ReleaseError(f"HEAD moved during the build; the packages are those of {commit}. Start again.")
    if not tag:
        _step(f"dry run passed: no tag was made. `make release TAG=1` also tags {commit[:12]} as {name}")
        return
    if name not in _tags(root):
        _git(root, "tag", "--annotate", name, commit, "--message", f"hf_cpu_accel {version}")
    _step(
        f"tagged {commit[:12]} as {name}; nothing was pushed. `git push origin {name}` starts the release workflow"
    )


def project_version(root: Path) -> str:
    """Return the version in pyproject.toml."""
    found = re.search(r'^version = "([^"]+)"$', (root / "pyproject.toml").read_text(), re.MULTILINE)
    if found is None:
        raise ReleaseError('pyproject.toml has no line `version = "..."`')
    return found[1]


def check_tree(root: Path) -> None:
    """Raise ReleaseError if files differ from the last commit or are not in it."""
    _step("check that the tree is clean")
    changed = _git(root, "status", "--porcelain")
    if changed:
        raise ReleaseError(f"the tree is not clean; commit, stash or remove:\n{changed}")


def check_changelog(root: Path, version: str) -> None:
    """Raise ReleaseError if CHANGELOG.md has no section of the version with a date and some text."""
    _step(f"check that CHANGELOG.md has a section of {version}")
    text = (root / "CHANGELOG.md").read_text()
    section = re.search(rf"^## \[?{re.escape(version)}\]? - (\S+)\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    if section is None:
        raise ReleaseError(f"CHANGELOG.md has no section `## {version} - YYYY-MM-DD`; write it")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", section[1]):
        raise ReleaseError(f"CHANGELOG.md dates {version} as {section[1]!r}; accepted: YYYY-MM-DD")
    if not section[2].strip():
        raise ReleaseError(f"the section of {version} in CHANGELOG.md is empty; write what changed")


def check_tag(root: Path, name: str, commit: str) -> None:
    """Raise ReleaseError if the tag exists on another commit."""
    _step(f"check that the tag {name} is free")
    if name in _tags(root) and _git(root, "rev-parse", f"{name}^{{commit}}") != commit:
        raise ReleaseError(
            f"the tag {name} exists on another commit; set a new version in pyproject.toml, or delete the tag"
        )


def check_packages(root: Path, version: str) -> None:
    """Print size and SHA-256 of each package. Raise ReleaseError if the source distribution or a wheel is missing."""
    packages = sorted((root / "dist").glob(f"hf_cpu_accel-{version}*"))
    for path in packages:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        print(f"{path.stat().st_size / 1e6:6.2f} MB  {digest}  dist/{path.name}")
    for ending in (".tar.gz", "_x86_64.whl", "_aarch64.whl"):
        if not any(path.name.endswith(ending) for path in packages):
            raise ReleaseError(
                f"dist/ has no hf_cpu_accel-{version}*{ending}; does pyproject.toml name that version?"
            )


def _tags(root: Path) -> Sequence[str]:
    return _git(root, "tag", "--list").splitlines()


def _step(text: str) -> None:
    print(f"== {text}", flush=True)


def _make(root: Path, target: str) -> None:
    subprocess.run(["make", "--no-print-directory", target], cwd=root, check=True)


def _git(root: Path, *arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
