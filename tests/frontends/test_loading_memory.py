"""`from_pretrained(cpu_optimize=...)` packs weight by weight out of the mapped checkpoint, which is never in memory as a whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import transformers

from tests.programs import run_program

# A process of its own: the kernel's high-water mark, above what the imports and a first accelerated model have taken.
CHILD = """
import sys, torch, transformers, hf_cpu_accel
from hf_cpu_accel.measure import PeakMemory
small = transformers.BertConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=128, vocab_size=99)
hf_cpu_accel.accelerate_for_cpu(transformers.BertModel(small).eval(), dtype=sys.argv[2])
with PeakMemory() as memory:
    model = transformers.BertModel.from_pretrained(sys.argv[1], cpu_optimize=sys.argv[2])
print(memory.peak_bytes)
hf_cpu_accel.restore(model)
"""


@pytest.fixture(scope="module", params=["bfloat16", "float16"])
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A checkpoint of 260 MB, in three files."""
    dtype = getattr(torch, request.param)
    sizes = {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 10,
        "num_attention_heads": 16,
    }
    config = transformers.BertConfig(**sizes, vocab_size=2000, dtype=dtype)
    with torch.device("meta"):
        model = transformers.BertModel(config).to(dtype)
    numbers = torch.randn(1 << 22).mul_(0.02).to(dtype)
    state = {
        name: numbers[: value.numel()].reshape(value.shape).clone() if value.is_floating_point() else value
        for name, value in model.state_dict().items()
    }
    model.load_state_dict(state, assign=True)
    folder: Path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder, max_shard_size="100MB")
    assert len(list(folder.glob("*.safetensors"))) == 3
    return folder


PACKED = {"int8": 0.5, "int4": 0.27}


@pytest.mark.parametrize("dtype", PACKED)
def test_the_peak_is_the_packed_weights_and_little_more(folder: Path, dtype: str, tmp_path: Path) -> None:
    done = run_program(CHILD, str(folder), dtype, folder=tmp_path, environment=os.environ)
    assert done.returncode == 0, done.stderr[-2000:]
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    # Of float16 weights one layer is in float32, and compared with what is packed of it.
    assert int(done.stdout) <= PACKED[dtype] * size + (130e6 if folder.name.startswith("float16") else 60e6)
