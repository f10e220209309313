"""What is compiled stays on disk for later processes, and for machines that trust it; nothing stale or foreign is loaded."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.runtime.cache_dir_utils import cache_dir

import hf_cpu_accel
from hf_cpu_accel import accelerate_for_cpu
from hf_cpu_accel.compiler.background import artifacts, description, jobs, worker
from hf_cpu_accel.compiler.background.attach import libraries_of
from hf_cpu_accel.compiler.background.worker import Job
from hf_cpu_accel.patching.acceleration import acceleration_of
from hf_cpu_accel.plan import CompiledRegion
from tests.compiler.background.conftest import SHAPE, blocks, call_until, state, switched


def test_another_process_needs_no_compiler_and_no_inductor(compiled_once: CompiledRegion, home: Path) -> None:
    program = (
        "import sys, torch\n"
        f"sys.path[:0] = [{str(Path(__file__).parents[3])!r}]\n"
        "from tests.compiler.background.conftest import blocks, call_until, state, switched, verdict\n"
        "from hf_cpu_accel import accelerate_for_cpu\n"
        "torch.set_num_threads(1)\n"
        "verdict.GAIN = 0.0\n"
        "model = accelerate_for_cpu(blocks(), dtype='float32', compile='background')\n"
        "call_until(model, torch.randn(2, 5, 32), lambda: switched(model), 20)\n"
        "assert state(model).cached == 1, state(model)\n"
        "assert 'torch._inductor.compile_fx' not in sys.modules and 'torch._dynamo.eval_frame' not in sys.modules\n"
    )
    environment = {
        **os.environ,
        "PATH": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(hf_cpu_accel.__file__).parents[1]),
    }
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_bundle_serves_elsewhere_if_it_is_trusted(
    compiled_once: CompiledRegion, model: nn.Sequential, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acceleration = acceleration_of(model)
    assert acceleration is not None
    assert artifacts.export(libraries_of(acceleration), tmp_path / "bundle") == 1
    monkeypatch.setenv("HF_CPU_ACCEL_HOME", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("PATH", "")
    given = {"dtype": "float32", "compile": "now", "compiled_bundle": tmp_path / "bundle"}
    with pytest.raises(ValueError, match="pass trust_compiled=True if you trust who made it"):
        accelerate_for_cpu(blocks(), **given)
    other, input = accelerate_for_cpu(blocks(), trust_compiled=True, **given), torch.randn(SHAPE)
    call_until(other, input, lambda: switched(other))
    assert state(other).cached == 1
    assert not list((tmp_path / "elsewhere").glob("compiled/*"))


def artefact(home: Path) -> Path:
    (made,) = [path for path in home.glob("compiled/*/*") if path.is_dir()]
    return made


@pytest.fixture
def copied(compiled_once: CompiledRegion, home: Path, tmp_path: Path) -> Path:
    """The artefact, in another folder."""
    return Path(shutil.copytree(artefact(home), tmp_path / "artefacts" / "copied"))


def test_what_is_kept_is_for_this_user_alone(compiled_once: CompiledRegion, home: Path) -> None:
    made = artefact(home)
    assert {path.name for path in made.iterdir()} == {"block.pt2", "block.json", "constants.safetensors"}
    for path in (made, *made.iterdir(), made.parent, made.parent.parent, home / "jobs"):
        assert path.stat().st_mode & 0o077 == 0, path
    assert not list((home / "jobs").iterdir())


def test_damaged_and_stale_artefacts_are_not_used(copied: Path, tmp_path: Path) -> None:
    assert artifacts.load(copied) is not None
    compiled = description.read(copied)
    source = tmp_path / "source.py"
    source.write_text("a = 1\n")
    compiled.sources[str(source)] = "of another text"
    description.write(compiled, copied)
    assert artifacts.load(copied) is None
    (copied / "block.json").write_bytes(b"nothing")
    assert artifacts.load(copied) is None


@pytest.mark.parametrize("name", ["..", ".", "block.pt2", "block.json", "constants.safetensors"])
@pytest.mark.parametrize("mode", [0o020, 0o002])
def test_what_others_can_write_to_is_not_loaded(
    copied: Path, name: str, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = (copied / name).resolve()
    path.chmod(path.stat().st_mode | mode)
    assert artifacts.load(copied) is None
    (record,) = caplog.records
    assert f"{path}: others can write to it (mode" in record.getMessage()
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
    made = artefact(home)
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
    assert "others can write to it (mode 777)" in warning
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
    assert (kind, text[:28]) == ("failed", "the compiling process left '")
    assert seen == [["log"], 0]
    assert not (tmp_path / "proof").exists()


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        '{"state": "done"}',
        '{"state": "run", "text": "", "cpu_seconds": 1.0}',
        '{"state": "done", "text": 3, "cpu_seconds": 1.0}',
        '{"state": "done", "text": "", "cpu_seconds": Infinity}',
        '{"state": "done", "text": "", "cpu_seconds": "1"}',
        "{",
    ],
)
def test_results_that_are_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(ValueError, match=r"no result|Expecting"):
        worker.result(tmp_path)


@pytest.mark.parametrize("mode", [None, 0o755, 0o775])
def test_inductor_reads_nothing_that_others_can_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int | None
) -> None:
    monkeypatch.setenv("HF_CPU_ACCEL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    if mode is not None:
        (tmp_path / "inductor").mkdir()
        (tmp_path / "inductor").chmod(mode)
    with worker._own_inductor_folder():
        folder = Path(cache_dir())
    assert folder == tmp_path / ("home/inductor" if mode == 0o775 else "inductor")
    assert folder.stat().st_mode & 0o777 == (mode if mode == 0o755 else 0o700)
    assert cache_dir() == str(tmp_path / "inductor")


def test_a_child_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    program = "trap '' TERM; echo ready; while :; do sleep 1; done"
    command = ["sh", "-c", program, "sh", str(scratch)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        monkeypatch.setattr(jobs, "_child", child)
        jobs._stop()
        assert child.wait() == -signal.SIGKILL
    assert not scratch.exists()
