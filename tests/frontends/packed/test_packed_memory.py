"""Processes that load one packed folder share its pages."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import transformers

from hf_cpu_accel import accelerate_for_cpu
from tests.programs import Forked, run_program

pytestmark = pytest.mark.usefixtures("installed")

CHILD = """
import sys, torch, hf_cpu_accel
from transformers import BertModel
import hf_cpu_accel.frontends.packed_loading
torch.set_num_threads(1)
torch.ones(1) @ torch.ones(1)
print("begun", flush=True)
sys.stdin.readline()
model = BertModel.from_pretrained(sys.argv[1])
with torch.no_grad():
    model(torch.arange(9)[None])
print("loaded", flush=True)
sys.stdin.readline()
"""

# A process that loads and forks: what the child has to itself when it has answered, too, in kB.
FORKING_CHILD = """
import os, re, sys, torch, hf_cpu_accel
from transformers import BertModel
model = BertModel.from_pretrained(sys.argv[1])
def answer():
    with torch.no_grad():
        model(torch.arange(9)[None])
answer()
child = os.fork()
if child == 0:
    answer()
    text = open("/proc/self/smaps_rollup").read()
    print(sum(map(int, re.findall(r"^Private_(?:Clean|Dirty):\\s+(\\d+)", text, re.M))), flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""


class Process:
    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-c", CHILD, str(folder)]
        with open(os.devnull, "w") as nowhere:
            self.child = Forked(command, cwd=folder, env=os.environ, stderr=nowhere)
        self.before = 0

    def begin(self) -> None:
        self.wait_for("begun")
        self.before = self.anonymous()
        self.go_on()

    def wait_for(self, word: str) -> None:
        assert self.child.stdout.readline().strip() == word

    def go_on(self) -> None:
        self.child.stdin.write("\n")
        self.child.stdin.flush()

    def anonymous(self) -> int:
        """Bytes of its own that no file backs."""
        return _field(Path(f"/proc/{self.child.pid}/smaps_rollup").read_text(), "Anonymous")

    def share_of(self, file: str) -> int:
        """Its proportional share (PSS) of the mapped file."""
        parts = re.split(
            r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path(f"/proc/{self.child.pid}/smaps").read_text(), flags=re.M
        )
        return sum(_field(part, "Pss") for part in parts if part.split("\n")[0].endswith(file))


def _field(text: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", text, re.M)
    assert found
    return int(found.group(1)) << 10


@pytest.fixture
def packed_file(tmp_path: Path) -> Path:
    """Of more than 100 MB."""
    sizes = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 4, "num_attention_heads": 12}
    model = transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=2000)).eval()
    accelerate_for_cpu(model, dtype="float32", verify=False)
    model.save_pretrained(tmp_path, packed=True)
    file = tmp_path / "cpu_accel.safetensors"
    assert file.stat().st_size > 100e6
    return file


def test_a_forked_process_has_little_to_itself(packed_file: Path, tmp_path: Path) -> None:
    done = run_program(FORKING_CHILD, str(packed_file.parent), folder=tmp_path, environment=os.environ)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) << 10 < 64e6


def test_processes_share_the_file_and_have_little_besides(packed_file: Path) -> None:
    file, size = packed_file, packed_file.stat().st_size
    processes = [Process(file.parent) for _ in range(3)]
    try:
        for process in processes:
            process.begin()
        for process in processes:
            process.wait_for("loaded")
        shares = [process.share_of(file.name) for process in processes]
        assert 0.9 * size < sum(shares) < 1.05 * size
        assert max(shares) < 0.4 * size
        assert all(process.anonymous() - process.before < 0.3 * size for process in processes)
    finally:
        for process in processes:
            process.child.kill()
            process.child.wait()
