"""The kernels of every instruction-set tier that this CPU runs, each in a process of its own (the tier is chosen once, at load)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hf_cpu_accel import extension
from hf_cpu_accel.runtime import hardware
from tests.programs import run_program

CHECKS = {
    "tests.ops.test_linear": "check_linear",
    "tests.ops.test_batch_invariance": "check_batch_invariance",
    "tests.ops.convolution.test_convolution": "check_convolution",
    "tests.ops.convolution.test_chain": "check_convolutions",
    "tests.ops.convolution.test_tiles": "check_tile_convolution",
    "tests.ops.convolution.test_images_in_bytes": "check_images_in_bytes",
    "tests.ops.test_attention": "check_attention",
    "tests.ops.test_norm": "check_norm",
    "tests.ops.test_group_norm": "check_group_norm",
    "tests.ops.encoder.test_layer": "check_encoder_layer",
    "tests.ops.decoder.test_layers": "check_decoder_layers",
    "tests.ops.test_embedding": "check_embedding",
    "tests.ops.test_experts": "check_experts",
    "tests.ops.test_paged_attention": "check_paged_attention",
    "tests.ops.test_quantize": "check_quantize",
    "tests.ops.recurrent.test_recurrent": "check_recurrent",
    "tests.ops.recurrent.test_lstm": "check_lstm",
    "tests.ops.test_deformable_attention": "check_deformable_attention",
    "tests.ops.test_rope": "check_rope",
    "tests.ops.test_snake": "check_snake",
    "tests.ops.sparse.test_ops": "check_sparse",
    "tests.ops.sparse.test_messages": "check_messages",
}

# Those that multiply by tiles: nothing else is emulated, and that slowly.
OF_TILES = (
    "check_linear",
    "check_batch_invariance",
    "check_convolution",
    "check_convolutions",
    "check_images_in_bytes",
    "check_attention",
    "check_experts",
)

best = extension.status().tier
FLAGS = hardware.detect().flags
CAPS = (*hardware.TIERS, hardware.EMULATED_AMX)
PRINT_TIER = "from hf_cpu_accel import extension; print(extension.status().tier)"
available = [tier for tier in CAPS if hardware.best_tier(FLAGS, tier) == tier]


def run(folder: Path, tier: str, code: str, **variables: str) -> str:
    environment = {**variables, **os.environ, "HF_CPU_ACCEL_ISA": tier}
    done = run_program(code, folder=folder, environment=environment, cpu_seconds=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_the_kernels_are_native() -> None:
    """Without this the tests below would pass over an extension that did not build."""
    assert best is not None, extension.status().error


def all_checks(cap: str) -> str:
    """The code that runs them and prints the tier."""
    calls = "; ".join(
        f"from {module} import {check}; {check}(seed={len(cap)})"
        for module, check in CHECKS.items()
        if cap != hardware.EMULATED_AMX or check in OF_TILES
    )
    return f"import torch; torch.set_num_threads(1); {calls}; {PRINT_TIER}"


@pytest.mark.parametrize("cap", CAPS)
def test_tier(tmp_path: Path, cap: str) -> None:
    """Caps that the CPU lacks too: the library and runtime/hardware.py look at it in different ways and must agree. The whole suite
    runs on the best tier, and on all others by `make test-tiers`."""
    checked = cap in available and cap != best
    code = all_checks(cap) if checked else PRINT_TIER  # a cap that it lacks is one of the tiers that it has
    assert run(tmp_path, cap, code).strip() == hardware.best_tier(FLAGS, cap)


SUMS = """
import hashlib, torch
from hf_cpu_accel.ops.linear import linear
from hf_cpu_accel.packing.linear import pack_linear
digest = hashlib.sha256()
for threads in (1, 2):
    torch.set_num_threads(threads)
    for m, k, n in [(1, 1, 1), (2, 65, 33), (3, 576, 100), (5, 127, 70), (16, 1536, 64), (131, 200, 40)]:
        g = torch.Generator().manual_seed(m)
        x, weight = torch.randn(m, k, generator=g), torch.randn(n, k, generator=g)
        for dtype in ("int8", "int4"):
            digest.update(linear(x, pack_linear(weight, dtype)).numpy().tobytes())
print(digest.hexdigest())
"""


def test_vector_tiers_of_x86_have_the_same_sums(tmp_path: Path) -> None:
    """With VNNI and without it: inputs have 8 bits and sums are exact integers, whichever instructions add them."""
    tiers = [tier for tier in available if tier.startswith("avx")]
    assert len({run(tmp_path, tier, SUMS) for tier in tiers}) <= 1


@pytest.mark.skipif("avx512_bf16" not in available, reason="the CPU has no vdpbf16ps instruction")
@pytest.mark.parametrize("dot", ["0", "1"])
def test_both_ways_to_multiply_bfloat16(tmp_path: Path, dot: str) -> None:
    """Which of the two serves is measured at load, so without this one of them would go untested on each machine."""
    code = "from tests.ops.test_linear import check_linear; check_linear(seed=3)"
    code += "; from hf_cpu_accel import extension; print(extension.status().bf16_dot)"
    assert run(tmp_path, "avx512_bf16", code, HF_CPU_ACCEL_BF16_DOT=dot).strip() == str(dot == "1")


def test_without_the_library_the_references_serve(tmp_path: Path) -> None:
    """The same package folder without its library: it imports, says what is missing, and gives the same answers."""
    package = Path(extension.__file__).parent
    copy = tmp_path / package.name
    copy.mkdir()
    for entry in package.iterdir():
        if not entry.name.startswith("_C"):
            (copy / entry.name).symlink_to(entry)
    calls = "; ".join(
        f"from {module} import {check}; {check}(seed=1)"
        for module, check in CHECKS.items()
        if check != "check_batch_invariance"  # torch promises no such thing
    )
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from hf_cpu_accel import extension; "
        f"status = extension.status(); assert not status.loaded, status; assert 'not built' in status.error; {calls}"
    )
    run(tmp_path, "generic", code)
    model = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import torch, transformers as tf; "
        "from hf_cpu_accel import accelerate_for_cpu, explain; "
        "config = tf.BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, vocab_size=99); "
        "model, ids = tf.BertModel(config).eval(), torch.randint(3, 99, (2, 7)); "
        "expected = model(ids)[0]; accelerate_for_cpu(model, dtype='float32'); "
        "torch.testing.assert_close(model(ids)[0], expected, rtol=1e-4, atol=1e-5); print(explain(model).kernels)"
    )
    assert run(tmp_path, "generic", model).strip() == "reference"


@pytest.mark.skipif("avx512_bf16" not in available, reason="the CPU has no vdpbf16ps instruction")
def test_rows_of_the_lowest_float_where_the_cpu_multiplies_bfloat16(tmp_path: Path) -> None:
    """Which is measured at load and may not be so here."""
    code = "import torch; from tests.ops.test_attention import check_lowest; "
    code += "[check_lowest(x, torch.bfloat16) for x in (torch.finfo(torch.float32).min, -1e30, -1e9)]"
    run(tmp_path, "avx512_bf16", code, HF_CPU_ACCEL_BF16_DOT="1")
