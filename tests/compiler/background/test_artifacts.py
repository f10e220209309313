"""What is compiled stays on disk for later processes, and for machines that trust it; nothing stale or foreign is loaded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import hf_cpu_accel
from hf_cpu_accel import accelerate_for_cpu
from hf_cpu_accel.compiler.background import artifacts, description, jobs, worker
from hf_cpu_accel.compiler.background.attach import libraries_of
from hf_cpu_accel.patching.acceleration import acceleration_of
from hf_cpu_accel.plan import CompiledRegion
from tests.compiler.background.conftest import SHAPE, artifact, blocks, call_until, state, switched


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
    with pytest.raises(ValueError, match="pass trust_compiled=True if you trust its source"):
        accelerate_for_cpu(blocks(), **given)
    other, input = accelerate_for_cpu(blocks(), trust_compiled=True, **given), torch.randn(SHAPE)
    call_until(other, input, lambda: switched(other))
    assert state(other).cached == 1
    assert not list((tmp_path / "elsewhere").glob("compiled/*"))


def test_what_is_kept_is_for_this_user_alone(compiled_once: CompiledRegion, home: Path) -> None:
    made = artifact(home)
    assert {path.name for path in made.iterdir()} == {"block.pt2", "block.json", "constants.safetensors"}
    for path in (made, *made.iterdir(), made.parent, made.parent.parent, home / "jobs"):
        assert path.stat().st_mode & 0o077 == 0, path
    assert not list((home / "jobs").iterdir())


def test_damaged_and_stale_artifacts_are_not_used(copied: Path, tmp_path: Path) -> None:
    assert artifacts.load(copied) is not None
    compiled = description.read(copied)
    source = tmp_path / "source.py"
    source.write_text("a = 1\n")
    compiled.sources[str(source)] = "of another text"
    description.write(compiled, copied)
    assert artifacts.load(copied) is None
    (copied / "block.json").write_bytes(b"nothing")
    assert artifacts.load(copied) is None


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
