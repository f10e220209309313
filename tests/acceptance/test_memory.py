"""What acceleration of a model of real size may cost in memory: the model and 15 %, at the worst moment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.programs import run_program

# A process of its own: the peak of the resident set is reset once the model is there (clear_refs), and read at the end.
SCRIPT = """
import sys, torch, transformers
from pathlib import Path
from hf_cpu_accel import accelerate_for_cpu

def status(name):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024

model = transformers.BertModel(transformers.BertConfig()).eval()
size = sum(parameter.nbytes for parameter in model.parameters())
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
accelerate_for_cpu(model, dtype=sys.argv[1])
with torch.inference_mode():
    model(input_ids=torch.ones(1, 128, dtype=torch.long))
print((status("VmHWM") - before) / size, (status("VmRSS") - before) / size)
"""

KEPT = {"float32": 0.15, "bfloat16": -0.25, "int8": -0.4}


@pytest.mark.parametrize("dtype", KEPT)
def test_peak_and_resident_memory(dtype: str, tmp_path: Path) -> None:
    """The peak of accelerating and of the first forward, and what the process holds afterwards, as parts of the model's size."""
    done = run_program(SCRIPT, dtype, folder=tmp_path, environment=os.environ)
    assert done.returncode == 0, done.stderr[-2000:]
    peak, resident = map(float, done.stdout.split()[-2:])
    assert peak <= 0.15
    assert resident <= KEPT[dtype]
