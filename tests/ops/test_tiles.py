"""AMX tiles: the same integers as vectors have, bfloat16 as the instruction is defined, beside torch's own tiles, and what if not.

Which kernels serve is chosen at load, so each tier computes in a process of its own. The emulated tiles refuse what the hardware
refuses, so that machines without AMX check shapes and addresses, too.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_cpu_accel import extension
from hf_cpu_accel.ops.attention import attention
from hf_cpu_accel.ops.linear import linear
from hf_cpu_accel.packing.linear import pack_linear
from hf_cpu_accel.runtime import hardware
from tests.programs import run_program

FLAGS = hardware.detect().flags
HAS_AMX = extension.status().tier == "amx"
INTEGERS = ("int8", "int8-weight", "int4")
# (rows, N, K): few rows, one tile, two, the rest of a third; the rest of a panel; the rest of a step along K, and less than one.
SHAPES = ((3, 64, 64), (5, 40, 72), (16, 32, 200), (17, 96, 128), (33, 70, 264), (70, 64, 20))
# (query rows, keys, features) of heads whose rows are all tiles': one, two, the rest of one; several blocks of keys.
HEADS = ((17, 32, 64), (32, 300, 80), (45, 520, 128))
SMALLEST = 2.0**-126  # what is closer to zero is zero

needs_vnni = pytest.mark.skipif(
    hardware.best_tier(FLAGS, "avx512_vnni") != "avx512_vnni",
    reason="tiles are emulated on AVX-512 with VNNI",
)
needs_amx = pytest.mark.skipif(not HAS_AMX, reason="the CPU has no AMX")


def problem(rows: int, out_features: int, in_features: int) -> tuple[Tensor, Tensor]:
    """(input, weight), both exact in bfloat16, with some denormals."""
    generator = torch.Generator().manual_seed(rows + in_features)
    input, weight = (
        torch.randn(count, in_features, generator=generator).bfloat16().float()
        for count in (rows, out_features)
    )
    input[:, 3], weight[:, 5] = 1e-39, -1e-39
    return input, weight


def queries_keys_values(q_len: int, kv_len: int, features: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(features)
    return tuple(
        torch.randn(2, heads, length, features, generator=generator).bfloat16()
        for heads, length in ((4, q_len), (2, kv_len), (2, kv_len))
    )


def compute(path: str) -> None:
    """All results of the tier of this process, into a file."""
    with torch.no_grad():
        results = {
            (dtype, shape): linear(input, pack_linear(weight, dtype))
            for dtype in (*INTEGERS, "bfloat16")
            for shape in SHAPES
            for input, weight in [problem(*shape)]
        }
        results |= {heads: attention(*queries_keys_values(*heads), is_causal=True) for heads in HEADS}
    torch.save(results, path)


def child(folder: Path, code: str, tier: str, **variables: str) -> str:
    environment = {**os.environ, **variables, "HF_CPU_ACCEL_ISA": tier}
    done = run_program(code, folder=folder, environment=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.strip()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[object, Tensor]]:
    folder = tmp_path_factory.mktemp("tiles")
    tiers = ("avx512_vnni", hardware.EMULATED_AMX, *(["amx"] if HAS_AMX else []))
    for tier in tiers:
        child(folder, f"from tests.ops.test_tiles import compute; compute({str(folder / tier)!r})", tier)
    return {tier: torch.load(folder / tier) for tier in tiers}


@needs_vnni
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_are_those_of_vectors(results, dtype: str, shape: tuple[int, int, int]) -> None:
    expected = results["avx512_vnni"][dtype, shape]
    for tier in results:
        assert torch.equal(results[tier][dtype, shape], expected), tier


def flush(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < SMALLEST, 0, x).astype(np.float32)


def add_product(sum: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """FMA: products of bfloat16 are exact in float64, and so are these sums until they are rounded once."""
    return flush((sum.astype(np.float64) + a.astype(np.float64) * b.astype(np.float64)).astype(np.float32))


def tile_product(input: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """input @ weight^T as TDPBF16PS defines it: of each 32 features the even and the odd ones apart, then both to the sum."""
    features = -(-input.shape[1] // 32) * 32
    a, b = (flush(np.pad(x, ((0, 0), (0, features - x.shape[1])))) for x in (input, weight))
    total = np.zeros((len(a), len(b)), np.float32)
    for start in range(0, features, 32):
        halves = [np.zeros_like(total), np.zeros_like(total)]
        for k in range(start, start + 32):
            halves[k % 2] = add_product(halves[k % 2], a[:, k, None], b[None, :, k])
        total = flush(total + flush(halves[0] + halves[1]))
    return total


@needs_vnni
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[0] > 16])  # fewer rows are no tiles
def test_bfloat16_is_what_the_instruction_defines(results, shape: tuple[int, int, int]) -> None:
    input, weight = problem(*shape)
    expected = torch.from_numpy(tile_product(input.numpy(), weight.numpy()))
    for tier in results:
        if tier != "avx512_vnni":
            assert torch.equal(results[tier]["bfloat16", shape], expected), tier


@needs_amx
@pytest.mark.parametrize("heads", HEADS)
def test_attention_is_what_emulated_tiles_give(results, heads: tuple[int, int, int]) -> None:
    """But where an exponential or a sum of vectors is another instruction's: a unit of the output's 8 bits."""
    found, expected = (results[tier][heads].float() for tier in ("amx", hardware.EMULATED_AMX))
    assert not torch.equal(found, results["avx512_vnni"][heads].float())  # tiles have computed them
    torch.testing.assert_close(found, expected, rtol=2.0**-7, atol=2.0**-9)


@needs_vnni
def test_wrong_tiles_do_not_serve(tmp_path: Path) -> None:
    code = "from hf_cpu_accel import extension as e; s = e.status(); print(s.tier, s.bf16_dot, s.without_tiles, sep='|')"
    found = child(tmp_path, code, hardware.EMULATED_AMX, HF_CPU_ACCEL_FAULTY_TILES="1")
    assert found == "avx512_vnni|False|a product of tiles is not what it should be"
    assert child(tmp_path, code, hardware.EMULATED_AMX) == "amx_emulated|True|None"


@needs_amx
def test_torch_and_ours_take_turns_with_the_tiles() -> None:
    """torch configures the tiles of a thread once for several of its products."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(48, 96, generator=generator)
    half, packed = (
        x.bfloat16(),
        [pack_linear(torch.randn(64, 96, generator=generator), d) for d in ("bfloat16", "int8")],
    )
    heads = torch.randn(2, 4, 160, 32, generator=generator).bfloat16()
    theirs = (
        lambda: half @ half.mT,
        lambda: F.scaled_dot_product_attention(heads, heads, heads),
        lambda: torch.bmm(heads[0], heads[0].mT),
    )
    ours = [lambda weight=weight: linear(x, weight) for weight in packed]
    with torch.no_grad():
        expected = [call() for call in (*theirs, *ours)]
        for _ in range(20):
            for first in range(len(theirs)):
                for second in range(len(ours)):
                    assert torch.equal(theirs[first](), expected[first])
                    assert torch.equal(ours[second](), expected[len(theirs) + second])


@pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump")
@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="libraries for other CPUs have no AMX code"
)
def test_a_step_loads_no_more_tiles_than_it_multiplies() -> None:
    """Of two by two: four loads, four products, and no tile that is stored or loaded again between. Sums, which are tiles 0 to 3,
    are loaded before the first step of a part of k."""
    command = ["objdump", "-d", "--no-show-raw-insn", str(extension.status().path)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names = re.findall(r"\t(tile(?:load|store)\w*|tdpb\w+) .*?(tmm\d)(?:,|$)", text, re.MULTILINE)
    code = "".join(
        "P"
        if name.startswith("tdp")
        else "S"
        if name.startswith("tilestore")
        else "L"
        if tile > "tmm3"
        else "B"
        for name, tile in names
    )
    assert len(re.findall("LLPLPLPP", code)) >= 8
    # One by two has three loads for two products. Nothing has more, wherever the compiler put it.
    assert 2 * code.count("L") <= 3 * code.count("P")
