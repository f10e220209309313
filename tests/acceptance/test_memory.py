"""What acceleration of a model of real size may cost in memory: the model and 15 %, at the worst moment."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.children import run_child

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


@pytest.fixture(scope="module")
def measured() -> dict[str, tuple[float, float]]:
    """{dtype: (peak, resident)}, each by a process that looks at itself alone: two at a time."""

    def measure(dtype: str) -> tuple[float, float]:
        done = run_child([sys.executable, "-c", SCRIPT, dtype], cpu_seconds=300)
        assert done.returncode == 0, done.stderr[-2000:]
        peak, resident = map(float, done.stdout.split()[-2:])
        return peak, resident

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(KEPT, pool.map(measure, KEPT), strict=True))


@pytest.mark.parametrize("dtype", KEPT)
def test_peak_and_resident_memory(dtype: str, measured: dict[str, tuple[float, float]]) -> None:
    """The peak of accelerating and of the first forward, and what the process holds afterwards, as parts of the model's size."""
    peak, resident = measured[dtype]
    assert peak <= 0.15
    assert resident <= KEPT[dtype]
