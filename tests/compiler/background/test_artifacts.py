"""What is compiled stays on disk for later processes, and for machines that trust it; nothing stale or foreign is loaded."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import hf_cpu_accel
from hf_cpu_accel import accelerate_for_cpu
from hf_cpu_accel.compiler.background import artifacts
from hf_cpu_accel.compiler.background.attach import libraries_of
from hf_cpu_accel.plan import CompiledRegion
from hf_cpu_accel.rewrite.apply import acceleration_of

from .conftest import SHAPE, blocks, call_until, state, switched


def test_another_process_needs_no_compiler_and_no_inductor(compiled_once: CompiledRegion, home: Path) -> None:
    program = (
        "import sys, torch\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from conftest import blocks, call_until, state, switched, verdict\n"
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


def test_damaged_and_stale_artefacts_are_not_used(
    compiled_once: CompiledRegion, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (made,) = [path for path in home.glob("compiled/*/*") if path.is_dir()]
    assert artifacts.load(made) is not None
    compiled = pickle.loads((made / "block.pickle").read_bytes())
    source = tmp_path / "source.py"
    source.write_text("a = 1\n")
    compiled.sources[str(source)] = "of another text"
    (tmp_path / "block.pickle").write_bytes(pickle.dumps(compiled))
    (tmp_path / "block.pt2").write_bytes((made / "block.pt2").read_bytes())
    assert artifacts.load(tmp_path) is None
    (tmp_path / "block.pickle").write_bytes(b"nothing")
    assert artifacts.load(tmp_path) is None


def test_what_others_can_write_to_is_not_loaded(
    compiled_once: CompiledRegion, home: Path, tmp_path: Path
) -> None:
    (made,) = [path for path in home.glob("compiled/*/*") if path.is_dir()]
    copied = Path(shutil.copytree(made, tmp_path / "copied"))
    assert artifacts.load(copied) is not None
    for path in (copied, copied / "block.pt2", copied / "block.pickle"):
        mode = path.stat().st_mode
        path.chmod(mode | 0o002)
        assert artifacts.load(copied) is None
        path.chmod(mode)
