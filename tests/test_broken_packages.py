"""Optional packages that raise as they are imported: a target that does not use them is accelerated as ever.

transformers and PyTorch Geometric import some of them, too: with these broken, their own targets cannot be made.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.children import run_child

# Which packages raise in one process, with which exception, and which targets do without them.
BROKEN = {
    ("torchvision", "accelerate"): ("RuntimeError", ["module", "network"]),
    ("transformers",): ("ImportError", ["module", "network"]),  # torch_geometric is ready for no other
    ("torch_geometric", "transformers"): ("SystemError", ["module"]),
    ("diffusers", "sentence_transformers", "peft", "optimum"): (
        "RuntimeError",
        ["module", "network", "bert"],
    ),
}

# One line of JSON per target: [name, fused modules, outputs that differ, hosts that were imported by us].
PROGRAM = """
import json, sys
import hf_cpu_accel
import torch
from torch import nn
from hf_cpu_accel import accelerate_for_cpu, explain, restore

HOSTS = {"torchvision", "accelerate", "transformers", "torch_geometric", "diffusers", "sentence_transformers", "peft", "optimum"}

def module():
    encoder = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.LayerNorm(32), encoder, nn.LSTM(32, 32))
    return model, (torch.randn(3, 5, 16),)

def network():
    import torch_geometric.nn as pyg
    return pyg.GraphSAGE(64, 64, num_layers=2, out_channels=10), (torch.randn(800, 64), torch.randint(0, 800, (2, 6000)))

def bert():
    from transformers import BertConfig, BertModel
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=99)
    return BertModel(BertConfig(**sizes)), (torch.randint(0, 99, (2, 7)), torch.ones(2, 7, dtype=torch.int64))

def first(output):
    output = output if torch.is_tensor(output) else output[0]
    return output if torch.is_tensor(output) else output[0]

for make in (globals()[name] for name in sys.argv[1:]):
    torch.manual_seed(0)
    model, args = make()
    model.eval()
    before = set(sys.modules)
    with torch.no_grad():
        expected = first(model(*args))
        accelerate_for_cpu(model, dtype="float32")
        outputs = [first(model(*args)) for _ in range(3)]
        replaced = len(explain(model).replaced)
        bits = first(restore(model)(*args))
    difference = max((output - expected).abs().max().item() for output in outputs)
    hosts = sorted({name for name in set(sys.modules) - before if name.partition(".")[0] in HOSTS})
    print(json.dumps([make.__name__, replaced, difference, torch.equal(bits, expected), hosts]), flush=True)
"""


@pytest.mark.parametrize("packages", BROKEN, ids="+".join)
def test_broken_packages_stop_no_target_that_does_without(packages: tuple[str, ...], tmp_path: Path) -> None:
    error, targets = BROKEN[packages]
    for package in packages:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(
            f"raise {error}('operator {package}::nms does not exist')\n"
        )
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    done = run_child(
        [sys.executable, "-c", PROGRAM, *targets],
        cpu_seconds=120,
        cwd=Path(__file__).parents[1],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = {name: rest for name, *rest in map(json.loads, done.stdout.splitlines())}
    assert list(found) == targets
    for name, (replaced, difference, restored, hosts) in found.items():
        assert replaced > 0
        assert difference < 1e-4
        assert restored
        assert name == "bert" or hosts == []
