"""`make release` in a small repository: what stops it, and that only TAG=1 leaves a tag. The packages are empty files."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "hf_cpu_accel-1.2.0.tar.gz",
    "hf_cpu_accel-1.2.0-cp310-abi3-manylinux_2_28_x86_64.whl",
    "hf_cpu_accel-1.2.0-cp310-abi3-manylinux_2_28_aarch64.whl",
)


def load_release() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hf_cpu_accel_release", ROOT / "release" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


release = load_release()


def git(root: Path, *arguments: str) -> str:
    who = ["-c", "user.name=Nobody", "-c", "user.email=nobody@example.org"]
    done = subprocess.run(["git", *who, *arguments], cwd=root, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "Nobody")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "nobody@example.org")
    root = tmp_path / "clone"
    root.mkdir()
    (root / "pyproject.toml").write_text('[project]\nversion = "1.2.0"\n')
    (root / "CHANGELOG.md").write_text(
        "# Changelog\n\n## Unreleased\n\n## 1.2.0 - 2026-11-29\n\n- It works.\n"
    )
    (root / ".gitignore").write_text("dist/\n")
    git(root, "init", "-q")
    commit(root)
    return root


def commit(root: Path) -> str:
    git(root, "add", "-A")
    git(root, "commit", "-q", "--allow-empty", "-m", "Change it")
    return git(root, "rev-parse", "HEAD")


def make(root: Path, target: str) -> None:
    """What the Makefile does, without a compiler."""
    (root / "dist").mkdir(exist_ok=True)
    if target == "wheels":
        for name in PACKAGES:
            (root / "dist" / name).touch()


def failing(of: str) -> object:
    def run(root: Path, target: str) -> None:
        if target == of:
            raise subprocess.CalledProcessError(2, ["make", target])
        make(root, target)

    return run


def test_a_dry_run_leaves_no_tag(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (clone / "dist").mkdir()
    (clone / "dist" / "hf_cpu_accel-1.1.0.tar.gz").touch()
    release.release(clone, tag=False, make=make)
    assert git(clone, "tag") == ""
    assert sorted(path.name for path in (clone / "dist").iterdir()) == sorted(PACKAGES)
    output = capsys.readouterr().out
    assert "removed dist/hf_cpu_accel-1.1.0.tar.gz" in output
    assert "dry run passed: no tag was made" in output


def test_a_release_tags_the_commit_that_was_built(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    release.release(clone, tag=True, make=make)
    assert git(clone, "rev-parse", "v1.2.0^{commit}") == git(clone, "rev-parse", "HEAD")
    assert "nothing was pushed" in capsys.readouterr().out
    release.release(clone, tag=True, make=make)  # once more, of the same commit
    assert git(clone, "tag") == "v1.2.0"


@pytest.mark.parametrize("target", ["wheels", "test-wheels"])
def test_a_failure_stops_before_the_tag(clone: Path, target: str) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        release.release(clone, tag=True, make=failing(target))
    assert git(clone, "tag") == ""


def test_packages_of_another_version_stop_it(clone: Path) -> None:
    (clone / "pyproject.toml").write_text('[project]\nversion = "1.3.0"\n')
    (clone / "CHANGELOG.md").write_text("## 1.3.0 - 2026-12-01\n\n- More.\n")
    commit(clone)
    with pytest.raises(release.ReleaseError, match=r"dist/ has no hf_cpu_accel-1.3.0\*.tar.gz"):
        release.release(clone, tag=True, make=make)
    assert git(clone, "tag") == ""


def test_a_changed_tree_stops_it(clone: Path) -> None:
    (clone / "new.py").touch()
    with pytest.raises(release.ReleaseError, match=r"the tree is not clean.*\n\?\? new.py"):
        release.release(clone, tag=False, make=make)


def test_a_commit_during_the_build_stops_it(clone: Path) -> None:
    def make_and_commit(root: Path, target: str) -> None:
        make(root, target)
        commit(root)

    with pytest.raises(release.ReleaseError, match="HEAD moved during the build"):
        release.release(clone, tag=True, make=make_and_commit)
    assert git(clone, "tag") == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# Changelog\n\n## Unreleased\n\n- It works.\n", "no section `## 1.2.0 - YYYY-MM-DD`"),
        ("## 1.2.0 - unreleased\n\n- It works.\n", "dates 1.2.0 as 'unreleased'"),
        ("## 1.2.0 - 2026-11-29\n\n## 1.1.0 - 2026-11-01\n\n- It works.\n", "is empty"),
    ],
)
def test_the_changelog_has_to_have_the_version(clone: Path, text: str, message: str) -> None:
    (clone / "CHANGELOG.md").write_text(text)
    commit(clone)
    with pytest.raises(release.ReleaseError, match=message):
        release.release(clone, tag=False, make=make)


def test_a_tag_on_another_commit_stops_it(clone: Path) -> None:
    git(clone, "tag", "v1.2.0")
    commit(clone)
    with pytest.raises(release.ReleaseError, match=r"the tag v1\.2\.0 exists on another commit"):
        release.release(clone, tag=False, make=make)
