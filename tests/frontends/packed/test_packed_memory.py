"""Processes that load one packed folder share its pages."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from hf_cpu_accel import accelerate_for_cpu

pytestmark = [pytest.mark.serial, pytest.mark.usefixtures("installed")]

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


class Process:
    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-c", CHILD, str(folder)]
        self.child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.before = 0

    def begin(self) -> None:
        self.wait_for("begun")
        self.before = self.anonymous()
        self.go_on()

    def wait_for(self, word: str) -> None:
        assert self.child.stdout is not None
        assert self.child.stdout.readline().strip() == word

    def go_on(self) -> None:
        assert self.child.stdin is not None
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


def test_processes_share_the_file_and_have_little_besides(tmp_path: Path) -> None:
    sizes = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 4, "num_attention_heads": 12}
    model = transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=2000)).eval()
    accelerate_for_cpu(model, dtype="float32", verify=False)
    model.save_pretrained(tmp_path, packed=True)
    file = tmp_path / "cpu_accel.safetensors"
    size = file.stat().st_size
    assert size > 100e6
    processes = [Process(tmp_path) for _ in range(3)]
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
            process.child.communicate()
