"""Artifacts that others could have written are not loaded, and nothing else of theirs is read or run."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import codecache
from torch._inductor.runtime.cache_dir_utils import cache_dir

from hf_cpu_accel import accelerate_for_cpu
from hf_cpu_accel.compiler.background import artifacts, description, jobs, worker
from hf_cpu_accel.compiler.background.worker import Job
from hf_cpu_accel.plan import CompiledRegion
from tests.compiler.background.conftest import SHAPE, artifact, blocks, call_until, state, switched


@pytest.mark.parametrize("name", ["..", ".", "block.pt2", "block.json", "constants.safetensors"])
@pytest.mark.parametrize("mode", [0o020, 0o002])
def test_what_others_can_write_to_is_not_loaded(
    copied: Path, name: str, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = (copied / name).resolve()
    path.chmod(path.stat().st_mode | mode)
    assert artifacts.load(copied) is None
    (record,) = caplog.records
    assert f"{path}: other users can write to it (mode" in record.getMessage()
    assert artifacts.load(copied, trusted=True) is not None


@pytest.mark.parametrize("name", [".", "block.pt2", "block.json", "constants.safetensors"])
def test_links_are_not_followed(copied: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    path = copied / name
    moved = path.resolve().rename(copied.parent / "moved")
    path.symlink_to(moved)
    assert artifacts.load(copied) is None
    assert f"{path}: it is a symbolic link" in caplog.records[0].getMessage()


def test_what_belongs_to_another_user_is_not_loaded(
    copied: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: copied.stat().st_uid + 1)
    assert artifacts.load(copied) is None
    assert "it belongs to user" in caplog.records[0].getMessage()


class Planted:
    """Unpickled, it makes a folder."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.proof),)


def _pickle(folder: Path) -> None:
    """What an earlier version would have run, and the same under the name of today."""
    for name in ("block.pickle", "block.json"):
        (folder / name).write_bytes(pickle.dumps(Planted(folder.parent / "proof")))


def _cut_off(folder: Path) -> None:
    path = folder / "block.json"
    path.write_text(path.read_text()[:-100])


def _other_code(folder: Path) -> None:
    (folder / "block.pt2").write_bytes(b"PK")


def _call_in_guard(folder: Path) -> None:
    found = json.loads((folder / "block.json").read_text())
    found["compiled"]["Compiled"]["guards"] = [f"__import__('os').mkdir({str(folder.parent / 'proof')!r})"]
    (folder / "block.json").write_text(json.dumps(found))


def _writable(folder: Path) -> None:
    folder.chmod(0o777)


def _link(folder: Path) -> None:
    folder.symlink_to(folder.rename(folder.parents[2] / "elsewhere"))


@torch.no_grad()
@pytest.mark.parametrize("damage", [_pickle, _cut_off, _other_code, _call_in_guard, _writable, _link])
def test_what_was_planted_is_replaced_by_what_is_compiled_anew(
    compiled_once: CompiledRegion,
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Path], None],
) -> None:
    made = artifact(home)
    genuine = Path(shutil.copytree(made, tmp_path / "genuine"))

    def compiled_again(job: Job) -> tuple[str, str, float]:
        (tmp_path / "made").mkdir()
        shutil.copyfile(genuine / "block.pt2", tmp_path / "made/block.pt2")
        return "done", str(artifacts.write(description.read(genuine), tmp_path / "made", job.into)), 1.0

    monkeypatch.setenv("HF_CPU_ACCEL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(jobs, "compile_here", compiled_again)
    planted = tmp_path / "home" / made.relative_to(home)
    planted.parent.mkdir(mode=0o700, parents=True)
    shutil.copytree(made, planted)
    damage(planted)
    model, input = blocks(), torch.randn(SHAPE)
    expected = model(input)
    accelerate_for_cpu(model, dtype="float32", compile="now")
    call_until(model, input, lambda: switched(model))
    torch.testing.assert_close(model(input), expected, atol=1e-5, rtol=1e-4)
    assert (state(model).cached, state(model).cpu_seconds) == (0, 1.0)
    assert not list(tmp_path.rglob("proof"))
    found = artifacts.load(planted)  # in the place of the other
    assert found is not None


@torch.no_grad()
def test_a_home_that_others_can_write_to_is_done_without(
    copied: Path,
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Not even what is in order there is loaded; what is compiled goes with the process."""
    shared = tmp_path / "shared"
    shutil.copytree(home, shared)
    shared.chmod(0o777)
    monkeypatch.setenv("HF_CPU_ACCEL_HOME", str(shared))
    asked: list[Path] = []

    def compiled_again(job: Job) -> tuple[str, str, float]:
        asked.append(job.into)
        (tmp_path / "made").mkdir()
        shutil.copyfile(copied / "block.pt2", tmp_path / "made/block.pt2")
        return "done", str(artifacts.write(description.read(copied), tmp_path / "made", job.into)), 1.0

    monkeypatch.setattr(jobs, "compile_here", compiled_again)
    model = accelerate_for_cpu(blocks(), dtype="float32", compile="now")
    call_until(model, torch.randn(SHAPE), lambda: switched(model))
    (into,) = asked
    assert not into.is_relative_to(shared)
    assert into.stat().st_mode & 0o077 == 0
    (warning,) = [record.getMessage() for record in caplog.records if str(shared) in record.getMessage()]
    assert "other users can write to it (mode 777)" in warning
    assert "set HF_CPU_ACCEL_HOME to a folder of your own" in warning


def test_nothing_is_imported_from_the_folder_that_a_process_is_started_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody may have put a `torch.py` there."""
    monkeypatch.setenv("HF_CPU_ACCEL_HOME", str(tmp_path / "home"))
    here = tmp_path / "here"
    here.mkdir()
    (here / "torch.py").write_text(f"import os; os.mkdir({str(tmp_path / 'proof')!r})")
    monkeypatch.chdir(here)
    job = Job(nn.Linear(3, 4), (torch.ones(2, 5),), {}, threads=1, into=tmp_path / "into")
    kind, text, _ = jobs.compile_in_child(job)
    assert (kind, text[:21]) == ("failed", "it cannot be traced: "), text
    assert not (tmp_path / "proof").exists()


def test_no_job_or_result_is_left_where_it_can_be_exchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job has no name, and a result that is no result is a reason."""
    monkeypatch.setenv("HF_CPU_ACCEL_HOME", str(tmp_path))
    seen: list[Any] = []

    def start(folder: Path, job: Any, log: Any) -> subprocess.Popen[bytes]:
        seen.extend((sorted(path.name for path in folder.iterdir()), os.fstat(job.fileno()).st_nlink))
        (folder / "result.json").write_bytes(pickle.dumps(Planted(tmp_path / "proof")))
        return subprocess.Popen(["true"])

    monkeypatch.setattr(jobs, "_start", start)
    job = Job(nn.Identity(), (), {}, threads=1, into=tmp_path / "into")
    kind, text, _ = jobs.compile_in_child(job)
    assert (kind, text[:28]) == ("failed", "the compiling process wrote ")
    assert seen == [["log"], 0]
    assert not (tmp_path / "proof").exists()


@pytest.mark.parametrize("mode", [None, 0o755, 0o775])
def test_inductor_reads_nothing_that_others_can_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int | None
) -> None:
    monkeypatch.setenv("HF_CPU_ACCEL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    if mode is not None:
        (tmp_path / "inductor").mkdir()
        (tmp_path / "inductor").chmod(mode)
    headers = codecache._HEADER_DIR
    with worker._private_inductor_folder():
        folder = Path(cache_dir())
        assert Path(codecache._HEADER_DIR).is_relative_to(folder)
        assert Path(codecache._HEADER_LOCK_DIR).is_relative_to(folder)
    assert headers == codecache._HEADER_DIR
    assert folder == tmp_path / ("home/inductor" if mode == 0o775 else "inductor")
    assert folder.stat().st_mode & 0o777 == (mode if mode == 0o755 else 0o700)
    assert cache_dir() == str(tmp_path / "inductor")
