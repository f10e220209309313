"""Measure time and memory of loading a language model: from its checkpoint, packed during the read, and from a packed folder.

    python -m benchmarks.packed_folders [--layers 17] [--only packing,peaks,loading,processes]

The model is a Llama of 2048 features with random weights; 17 layers are 1.9 GB in bfloat16, and 1.0 GB packed in int8. Each row is
measured in a separate process. "peak" is the high-water mark of a process above the memory of its imports.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_cpu_accel import accelerate_for_cpu
from hf_cpu_accel.measure.peak_memory import PeakMemory
from hf_cpu_accel.packing.linear import pack_linear

DTYPES = ("bfloat16", "int8", "int4")
SOURCES = ("bfloat16", "float16", "float32")
_PROCESSES = 4


def write_checkpoint(folder: Path, layers: int, dtype: str, shard: str) -> int:
    """Write the checkpoint; return the bytes of its weights in bfloat16."""
    sizes = {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    }
    config = LlamaConfig(**sizes, num_hidden_layers=layers, vocab_size=32000, dtype=dtype)
    kind = getattr(torch, dtype)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config).to(kind)
    # Of an odd count, so that no two rows are alike: between heads that are, no layer can tell which is whose.
    numbers = torch.randn((1 << 20) + 7, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(kind)
    model = model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            flat = parameter.view(-1)
            for start in range(0, len(flat), len(numbers)):
                piece = flat[start : start + len(numbers)]
                piece.copy_(numbers[: len(piece)] if parameter.dim() > 1 else torch.ones_like(piece))
    model.save_pretrained(folder, max_shard_size=shard)
    return 2 * sum(parameter.numel() for parameter in model.parameters())


def answer(model: Any) -> None:
    ids = torch.arange(1, 33)[None]
    with torch.no_grad():
        model(ids)
    model.generate(ids, max_new_tokens=8, do_sample=False)


def packing(rows: int = 11008, columns: int = 4096) -> None:
    """Print GB/s of bfloat16 weights."""
    weight = torch.randn(rows, columns).bfloat16()
    for dtype in DTYPES:
        pack_linear(weight, dtype)
        times = []
        for _ in range(5):
            start = time.perf_counter()
            pack_linear(weight, dtype)
            times.append(time.perf_counter() - start)
        print(f"packing {dtype}: {weight.nbytes / min(times) / 1e9:.2f} GB/s")


def peak(folder: str, dtype: str) -> None:
    """Of `from_pretrained(folder, cpu_optimize=dtype)`, in MB, and the seconds it took."""
    accelerate_for_cpu(AutoModelForCausalLM.from_config(_tiny()).eval(), dtype=dtype)
    start = time.perf_counter()
    with PeakMemory() as memory:
        AutoModelForCausalLM.from_pretrained(folder, cpu_optimize=dtype)
    print(f"{memory.peak_bytes / 1e6:.0f} {time.perf_counter() - start:.2f}")


def loading(folder: str) -> None:
    """Seconds from `from_pretrained` of a packed folder to the first answer, once its file is in the page cache."""
    for file in Path(folder).glob("*.safetensors"):
        file.read_bytes()
    AutoModelForCausalLM.from_config(_tiny())
    start = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(folder)
    loaded = time.perf_counter()
    with torch.no_grad():
        model(torch.arange(1, 33)[None])
    print(f"loading {loaded - start:.2f} s, first answer {time.perf_counter() - loaded:.2f} s")


def processes(folder: str) -> None:
    """Proportional set sizes (Pss) in MB: of processes that load a packed folder, and that are forked from one that has."""
    command = [sys.executable, "-m", "benchmarks.packed_folders", "--child", "serve", folder]
    started: list[subprocess.Popen[str]] = []
    try:
        for count in (1, _PROCESSES):
            while len(started) < count:
                started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
                output = started[-1].stdout
                assert output is not None
                output.readline()
            print(f"{count} started: {sum(_proportional(child.pid) for child in started):.0f}", flush=True)
    finally:
        for child in started:
            child.kill()
            child.communicate()
    model = AutoModelForCausalLM.from_pretrained(folder)
    answer(model)
    forked = [_forked(functools.partial(answer, model)) for _ in range(_PROCESSES - 1)]
    print(f"1 and {len(forked)} forked: {sum(map(_proportional, (os.getpid(), *forked))):.0f}")
    for child_id in forked:
        os.kill(child_id, signal.SIGKILL)
        os.waitpid(child_id, 0)


def serve(folder: str) -> None:
    answer(AutoModelForCausalLM.from_pretrained(folder))
    print("ready", flush=True)
    signal.pause()


def _forked(call: Callable[[], None]) -> int:
    """The number of a process that has made the call, and waits."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        call()
        os.write(writing, b".")
        signal.pause()
    os.read(reading, 1)
    return child


def _proportional(process: int) -> float:
    found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{process}/smaps_rollup").read_text(), re.MULTILINE)
    assert found is not None
    return int(found.group(1)) * 1024 / 1e6


def _tiny() -> LlamaConfig:
    return LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=99
    )


_CHILDREN: dict[str, Callable[..., None]] = {
    "packing": packing,
    "peak": peak,
    "loading": loading,
    "processes": processes,
    "serve": serve,
}


def in_a_process(name: str, *arguments: str) -> str:
    command = [sys.executable, "-m", "benchmarks.packed_folders", "--child", name, *arguments]
    return subprocess.run(
        command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ).stdout.strip()


def measure(only: Sequence[str], layers: int, sources: Sequence[str]) -> None:
    if "packing" in only:
        print(in_a_process("packing"), flush=True)
    for source in sources if "peaks" in only else ():
        for shard in ("50GB", "300MB"):
            with tempfile.TemporaryDirectory() as folder:
                size = write_checkpoint(Path(folder), layers, source, shard) / 1e6
                found, seconds = in_a_process("peak", folder, "int8").split()
                print(
                    f"{source} in files of at most {shard}: {size:.0f} MB in bfloat16, peak {found} MB in int8 "
                    f"(bar {0.6 * size + 400:.0f}), {seconds} s",
                    flush=True,
                )
    if {"loading", "processes"} & {*only}:
        with tempfile.TemporaryDirectory() as folder:
            checkpoint, packed = Path(folder) / "checkpoint", Path(folder) / "packed"
            write_checkpoint(checkpoint, layers, "bfloat16", "50GB")
            model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, cpu_optimize="int8")
            model.save_pretrained(packed, packed=True)
            del model
            for name in ("loading", "processes"):
                if name in only:
                    print(in_a_process(name, str(packed)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.packed_folders", description=__doc__)
    parser.add_argument("--layers", type=int, default=17)
    parser.add_argument("--only", default="packing,peaks,loading,processes")
    parser.add_argument("--sources", default=",".join(SOURCES), help="dtypes of checkpoints")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        name, *arguments = given.child
        _CHILDREN[name](*arguments)
    else:
        measure(given.only.split(","), given.layers, given.sources.split(","))


if __name__ == "__main__":
    main()
