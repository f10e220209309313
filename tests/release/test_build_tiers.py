"""The tiers that a build compiles, by HF_CPU_ACCEL_TIERS, and a library that leaves some out.

Nothing is compiled here: the library is linked from the objects of the last build, in build/kernels.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_cpu_accel import extension
from hf_cpu_accel.runtime import hardware
from tests.programs import run_program

ROOT = Path(__file__).resolve().parents[2]
OBJECTS = ROOT / "build" / "kernels"
ALL = ("generic", "avx2", "avx2_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx", "amx_emulated")
ZEN4 = [
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512dq",
    "avx512vl",
    "avx512cd",
    "avx512_vnni",
    "avx512_bf16",
]
FLAGS = sorted(frozenset().union(*hardware._TIER_FLAGS.values()))


def load_build_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hf_cpu_accel_build_script", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build_script = load_build_script()
x86 = pytest.mark.skipif(not build_script.X86, reason="the tiers are those of x86")


@x86
@pytest.mark.parametrize(
    ("wanted", "tiers"),
    [
        ("all", ALL),
        ("generic", ("generic",)),
        ("avx2", ("generic", "avx2")),
        ("avx512,avx2", ("generic", "avx2", "avx512")),
        (" avx512  avx2 ", ("generic", "avx2", "avx512")),
        ("amx", ("generic", "avx512_bf16", "amx")),
        ("amx_emulated", ("generic", "avx512_vnni", "amx_emulated")),
    ],
)
def test_tiers_to_build(wanted: str, tiers: tuple[str, ...]) -> None:
    assert build_script.tiers_to_build(wanted, ()) == list(tiers)


@x86
@pytest.mark.parametrize(
    "wanted", ["", ",", "avx1024", "avx2,AVX512", "native,avx2", "all avx2", "neon_dotprod"]
)
def test_unknown_tiers_raise(wanted: str) -> None:
    message = f"HF_CPU_ACCEL_TIERS={wanted!r}: .* is no tier of x86_64; accepted: all, native, or some of generic, avx2, "
    with pytest.raises(ValueError, match=message):
        build_script.tiers_to_build(wanted, ())


@x86
@given(st.frozensets(st.sampled_from(FLAGS)))
def test_native_is_the_tier_that_the_package_chooses(flags: frozenset[str]) -> None:
    """The two tables of flags are the same one: setup.py cannot import the package."""
    best = hardware.best_tier(flags - hardware._TIER_FLAGS["neon_i8mm_bf16"])
    tiers = build_script.tiers_to_build("native", flags)
    assert tiers[-1] == best
    below = build_script.BELOW_TILES.get(best)
    assert set(tiers) == {"generic", best, *([below] if below else [])}


def test_flags_are_those_of_the_package() -> None:
    for tier, flags in build_script.NATIVE_FLAGS.items():
        assert set(flags.split()) == hardware._TIER_FLAGS[tier], tier
    assert set(build_script.NATIVE_FLAGS) == set(hardware.TIERS)


def test_native_on_another_machine_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_script.platform, "machine", lambda: "riscv64")
    with pytest.raises(ValueError, match="native needs /proc/cpuinfo of the machine that runs the kernels"):
        build_script.cpu_flags()


def jobs() -> list:
    tiers = [
        build_script.Job(tier, ["g++", "-O3", "-o", f"build/tier_{tier}.o"], Path(f"build/tier_{tier}.o"))
        for tier in ALL
    ]
    return [*tiers, build_script.Job(None, ["g++", "-o", "build/ops.o"], Path("build/ops.o"))]


def linked(wanted: str, *fresh: str) -> list[str]:
    objects = build_script.jobs_to_link(jobs(), wanted, lambda target: target.stem in fresh)
    return [str(job.target.relative_to("build")) for job in objects]


@x86
def test_a_native_build_compiles_the_tier_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """And `generic` quickly, unless it is there: `generic` of the same name is what a later build for all tiers compiles."""
    monkeypatch.setattr(build_script, "cpu_flags", lambda: ZEN4)
    assert linked("native") == ["quick/tier_generic.o", "tier_avx512_bf16.o", "ops.o"]
    (generic, *_) = build_script.jobs_to_link(jobs(), "native", lambda target: False)
    assert generic.command == ["g++", "-O3", "-o", "build/quick/tier_generic.o", "-O1"]
    assert linked("native", "tier_generic", "tier_avx2") == [
        "tier_generic.o",
        "tier_avx2.o",
        "tier_avx512_bf16.o",
        "ops.o",
    ]
    monkeypatch.setattr(build_script, "cpu_flags", list)
    assert linked("native") == ["tier_generic.o", "ops.o"]


@x86
def test_a_native_build_leaves_a_complete_library_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_script, "cpu_flags", lambda: ZEN4)
    up_to_date = [job.target.stem for job in jobs()]
    assert linked("native", *up_to_date) == linked("all")
    assert len(linked("all")) == len(jobs())


@x86
def test_a_list_is_exact() -> None:
    """Objects of earlier builds are not linked."""
    assert linked("avx2", "tier_avx512", "tier_generic") == ["tier_generic.o", "tier_avx2.o", "ops.o"]


@pytest.fixture(scope="module")
def partial_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package, whose library has the kernels of `generic` and `avx512` alone."""
    folder = tmp_path_factory.mktemp("partial")
    package = Path(extension.__file__).parent
    copy = folder / package.name
    copy.mkdir()
    for entry in package.iterdir():
        if not entry.name.startswith("_C"):
            (copy / entry.name).symlink_to(entry)
    objects = [
        path
        for path in sorted(OBJECTS.glob("*.o"))
        if path.stem in ("tier_generic", "tier_avx512") or not path.stem.startswith("tier_")
    ]
    torch = OBJECTS / "libtorch_cpu.so"
    command = [build_script.CXX, "-shared", *objects, "-Wl,--no-as-needed", torch, "-o", copy / "_C.abi3.so"]
    subprocess.run(command, check=True)
    return folder


PROGRAM = """
import sys; sys.path.insert(0, {folder!r})
import torch
from hf_cpu_accel import extension
from hf_cpu_accel.cli import doctor
from hf_cpu_accel.ops.linear import linear
from hf_cpu_accel.packing.linear import pack_linear
assert extension.__file__.startswith({folder!r})
for dtype in ("float32", "bfloat16", "int8"):
    x, weight = torch.randn(5, 64), torch.randn(32, 64)
    torch.testing.assert_close(linear(x, pack_linear(weight, dtype)), x @ weight.T, atol=0.5, rtol=0.1)
print(extension.status().tier, *extension.built_tiers())
print(doctor.collect()["checks"][0]["value"])
"""


@x86
@pytest.mark.skipif(
    not (OBJECTS / "tier_avx512.o").exists() or shutil.which(build_script.CXX) is None,
    reason="there are no objects to link, or there is no compiler",
)
@pytest.mark.skipif("avx512f" not in hardware.detect().flags, reason="the CPU has no AVX-512")
@pytest.mark.parametrize(
    ("cap", "tier"),
    [
        (None, "avx512"),
        ("amx", "avx512"),
        ("amx_emulated", "avx512"),
        ("avx512", "avx512"),
        ("avx2_vnni", "generic"),
        ("avx2", "generic"),
        ("generic", "generic"),
    ],
)
def test_a_partial_library_uses_the_best_built_tier(
    partial_package: Path, tmp_path: Path, cap: str | None, tier: str
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != hardware.ISA_VARIABLE}
    if cap is not None:
        environment[hardware.ISA_VARIABLE] = cap
    program = PROGRAM.format(folder=str(partial_package))
    done = run_program(program, folder=tmp_path, environment=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    tiers, kernels = done.stdout.splitlines()
    assert tiers.split() == [tier, "generic", "avx512"]
    assert kernels.startswith(f"native, {tier}")
    assert kernels.endswith("built for generic, avx512 only")


@pytest.mark.skipif(not extension.status().loaded, reason="the kernels are not built")
def test_the_library_of_the_tests_has_all_tiers() -> None:
    built = set(extension.built_tiers()) - {hardware.EMULATED_AMX}
    assert built == set(hardware.tiers_of(platform.machine())), "run `make kernels`"
