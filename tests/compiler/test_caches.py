"""Compiled graphs are found again by another process, for other weights, and only if nothing of ours has changed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import hf_cpu_accel
from hf_cpu_accel.compiler.fingerprint import fingerprint, fingerprint_of
from tests.programs import run_program

PACKAGE = Path(hf_cpu_accel.__file__).parent

PROGRAM = """
import json, torch
from torch import nn
from hf_cpu_accel.compiler.backend import hf_cpu_accel
from torch._dynamo.utils import counters
torch.set_num_threads(1)
torch.manual_seed({seed})
model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32)).eval()
fast = torch.compile(model, backend=hf_cpu_accel, dynamic=True)
with torch.no_grad():
    for rows in (3, 5):
        input = torch.randn(rows, 16)
        torch.testing.assert_close(fast(input), model(input), atol=1e-5, rtol=1e-4)
print(json.dumps({**counters["aot_autograd"], **counters["inductor"]}))
"""


def run(folder: Path, seed: int) -> dict[str, int]:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
    done = run_program(PROGRAM.replace("{seed}", str(seed)), folder=folder, environment=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_both_caches_hit_in_a_second_process_with_other_weights(tmp_path: Path) -> None:
    first, second = run(tmp_path, 0), run(tmp_path, 1)
    assert first["autograd_cache_miss"] == 1
    assert second["autograd_cache_hit"] == 1
    assert second.get("fxgraph_cache_hit") == 1
    assert "autograd_cache_bypass" not in {**first, **second}
    assert "fxgraph_cache_bypass" not in {**first, **second}


def test_any_changed_file_changes_the_key(tmp_path: Path) -> None:
    assert fingerprint() == fingerprint_of(PACKAGE)
    copy = tmp_path / "package"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    assert fingerprint_of(copy) == fingerprint()
    keys = {fingerprint()}
    changed = (
        "compiler/passes/linear.py",
        "compiler/rewriter.py",
        "ops/norm.py",
        "packing/linear.py",
        "packing/convolution.py",
        "packing/winograd.py",
        "csrc/ops/tiles.h",
        "abi.py",
    )
    for name in changed:
        path = copy / name
        path.write_text(path.read_text() + "# changed\n")
        keys.add(fingerprint_of(copy))
    (copy / "compiler/passes/new.py").write_text("")
    keys.add(fingerprint_of(copy))
    assert len(keys) == len(changed) + 2
