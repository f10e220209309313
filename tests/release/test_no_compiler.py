"""Without a compiler: native kernels run, and `doctor` reports that nothing can be generated."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from hf_cpu_accel import extension
from tests.children import run_child

# In a process of its own, with nothing on its PATH: what it prints is what was found.
PROGRAM = r"""
import json, re
from pathlib import Path
import torch
from torch import nn

def runtimes():
    return sorted(set(re.findall(r"lib(?:gomp|iomp|omp)[^/\s]*", Path("/proc/self/maps").read_text())))

brought = runtimes()
from hf_cpu_accel import accelerate_for_cpu, explain
from hf_cpu_accel.cli import doctor
report = {check["name"]: check["value"] for check in doctor.collect()["checks"]}

torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.LayerNorm(64)) for _ in range(2)]).eval()
input = torch.randn(3, 64)
with torch.no_grad():
    expected = model(input)
    through_backend = torch.compile(model, backend="hf_cpu_accel")(input)
    accelerate_for_cpu(model, dtype="float32")
    accelerated = model(input)
torch.testing.assert_close(through_backend, expected, atol=1e-5, rtol=1e-4)
torch.testing.assert_close(accelerated, expected, atol=1e-5, rtol=1e-4)
plan = explain(model)
print(json.dumps({
    "kernels": report["kernels"],
    "compiling": report["compiling"],
    "replaced": len(plan.replaced),
    "runtimes of torch": brought,
    "runtimes of all": runtimes(),
}))
"""


@pytest.mark.skipif(not extension.status().loaded, reason="the kernels are not built")
def test_kernels_run_without_a_compiler(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("CXX", "CC")}
    environment |= {"PATH": str(tmp_path), "HF_CPU_ACCEL_HOME": str(tmp_path)}
    done = run_child([sys.executable, "-c", PROGRAM], env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["kernels"].startswith("native, ")
    assert found["replaced"]
    assert found["compiling"] == "torch.compile generates no code: no C++ compiler found"
    # The kernels run on torch's own threads.
    assert found["runtimes of all"] == found["runtimes of torch"]
