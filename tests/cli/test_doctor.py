"""`hf-cpu-accel doctor`: each thing that makes models slow is found, named and given a fix."""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hf_cpu_accel import extension
from hf_cpu_accel.cli import checks, doctor, packages
from hf_cpu_accel.cli.main import app
from hf_cpu_accel.compiler.torch_private import versions
from hf_cpu_accel.extension import ExtensionStatus
from hf_cpu_accel.runtime import hardware, threads
from hf_cpu_accel.runtime.hardware import CPUInfo
from hf_cpu_accel.runtime.memory import HeapStatus
from hf_cpu_accel.runtime.threads import ThreadChoice

GIB = 1 << 30
CPU = CPUInfo(
    model_name="Fake [fast] CPU",
    vendor="Fake",
    arch="x86_64",
    flags=frozenset({"avx2", "fma"}),
    tier="avx512_bf16",
    uncapped_tier="avx512_bf16",
    physical_cores=8,
    logical_cores=16,
    affinity=tuple(range(16)),
    affinity_cores=8,
    cgroup_quota=None,
    cgroup_memory_limit=None,
    memory_total=64 * GIB,
    memory_available=32 * GIB,
    l1d=48 << 10,
    l2=2 << 20,
    l3=None,
    numa_nodes=1,
    affinity_nodes=1,
    transparent_hugepages="always",
    threads=8,
    thread_reason="8 because the 16 logical CPUs are 8 physical cores",
)
NATIVE = ExtensionStatus(loaded=True, error=None, tier="avx512_bf16", bf16_dot=True, path="/x/_C.so")
NOT_BUILT = ExtensionStatus(
    loaded=False, error="the kernels were not built", tier=None, bf16_dot=False, path=None
)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """A healthy machine; threads as torch has them by itself."""
    before = torch.get_num_threads()
    monkeypatch.setattr(hardware, "detect", lambda: CPU)
    monkeypatch.setattr(extension, "status", lambda: NATIVE)
    monkeypatch.setattr(threads, "apply_threads", lambda: ThreadChoice(8, CPU.thread_reason, "hardware"))
    monkeypatch.setenv("HF_CPU_ACCEL_HOME", str(tmp_path))
    monkeypatch.setattr(doctor.memory, "memory_stall", lambda: 0.0)
    monkeypatch.setattr(packages, "import_failures", dict)
    yield monkeypatch
    torch.set_num_threads(before)


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["doctor", *arguments], env={"COLUMNS": "200"})
    return result.exit_code, result.output


def test_healthy_machine(machine: pytest.MonkeyPatch) -> None:
    code, output = run()
    assert code == 0
    assert "No problems found." in output
    assert "native, avx512_bf16" in output
    assert "Fake [fast] CPU" in output  # rich would take [fast] for markup
    assert CPU.thread_reason in output
    assert f"torch {importlib.metadata.version('torch')}" in output


def test_missing_kernels(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(extension, "status", lambda: NOT_BUILT)
    code, output = run("--peaks")  # nothing to measure with: no peaks, no crash
    assert code == 1
    assert "the kernels were not built" in output
    assert "Fix: Install a C++ compiler" in output
    assert "GFLOP/s" not in output


def test_json(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(hardware, "detect", lambda: replace(CPU, tier="avx2"))
    code, output = run("--json")
    report = json.loads(output)
    assert code == 1
    assert report["ok"] is False
    assert [check["name"] for check in report["checks"] if check["status"] == "problem"] == [
        "instruction tier"
    ]
    assert report["cpu"]["flags"] == ["avx2", "fma"]
    assert report["versions"]["torch"] == importlib.metadata.version("torch")
    assert report["peaks"] is None


def test_unknown_tier_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_CPU_ACCEL_ISA", "fast")
    monkeypatch.setattr(hardware, "detect", hardware.probe)
    code, output = run()
    assert code == 1
    assert "'fast' is not an instruction tier" in output
    assert "unset HF_CPU_ACCEL_ISA" in output


def test_peaks_are_shown(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(hardware, "measure_peaks", lambda: hardware.Peaks(226.4, 457.0, 905.0, 36.25, 2))
    code, output = run("--peaks")
    assert code == 0
    assert "float32 226 GFLOP/s, bfloat16 457 GFLOP/s, int8 905 GOP/s, reads 36.2 GB/s" in output


def test_kernels_below_the_cpu() -> None:
    found = checks.kernels(replace(NATIVE, tier="avx2"), CPU)
    assert found.status == "problem"
    assert "avx2, although this CPU can run avx512_bf16" in found.value


def test_a_build_that_left_tiers_out_lists_the_built_ones() -> None:
    built = ("generic", "avx512_bf16")
    found = checks.kernels(NATIVE, CPU, built)
    assert found == checks.Check("kernels", "native, avx512_bf16; built for generic, avx512_bf16 only")
    capped = replace(CPU, tier="avx2")
    found = checks.kernels(replace(NATIVE, tier="generic"), capped, built)
    assert found.status == "problem"
    assert found.value == (
        "native, generic, although this CPU can run avx2; built for generic, avx512_bf16 only"
    )
    assert "`make kernels`" in found.fix
    assert checks.kernels(NATIVE, CPU, hardware.tiers_of("x86_64")).value == "native, avx512_bf16"


def test_amx_that_is_not_used() -> None:
    amx = replace(CPU, tier="amx", uncapped_tier="amx")
    assert checks.kernels(replace(NATIVE, tier="amx"), amx) == checks.Check("kernels", "native, amx")
    refused = replace(NATIVE, without_tiles="the kernel refuses AMX tiles to this process (arch_prctl)")
    found = checks.kernels(refused, amx)
    assert found.status == "problem"
    assert "avx512_bf16, not amx: the kernel refuses AMX tiles" in found.value
    # Why it is so is of no interest where the CPU has none, or where another tier was asked for.
    assert checks.kernels(refused, CPU).status == "ok"


def test_capped_kernels_are_not_blamed_twice() -> None:
    capped = replace(CPU, tier="avx2")
    assert checks.kernels(replace(NATIVE, tier="avx2"), capped).status == "ok"
    assert checks.tier(capped) == checks.Check(
        "instruction tier",
        "avx2, although this CPU can run avx512_bf16",
        "problem",
        "HF_CPU_ACCEL_ISA caps it: `unset HF_CPU_ACCEL_ISA`.",
    )


def test_old_cpus_are_a_note() -> None:
    old = replace(CPU, tier="generic", uncapped_tier="generic")
    assert checks.tier(old).status == "note"
    assert checks.tier(replace(old, arch="aarch64")).status == "ok"


@pytest.mark.parametrize(
    ("source", "fix"),
    [
        ("environment", "export OMP_NUM_THREADS=8"),
        ("user", "torch.set_num_threads(8)"),
        ("argument", "threads=8"),
    ],
)
@pytest.mark.parametrize("count", [1, 16])
def test_threads_above_and_below_the_limit(source: str, fix: str, count: int) -> None:
    found = checks.threads(ThreadChoice(count, f"{count} as set", source), CPU)
    assert found.status == "problem"
    assert fix in found.fix
    assert "8" in found.value


@pytest.mark.parametrize(
    ("quota", "status"), [(None, "ok"), (2.0, "ok"), (1.0, "ok"), (1.5, "note"), (0.5, "problem")]
)
def test_quota(quota: float | None, status: str) -> None:
    found = checks.quota(replace(CPU, cgroup_quota=quota))
    assert found.status == status
    assert ("none" if quota is None else f"{quota:g} CPUs") == found.value


def test_affinity() -> None:
    assert checks.affinity(CPU) == checks.Check("affinity", "CPUs 0-15, 8 cores")
    found = checks.affinity(replace(CPU, affinity=(3,), affinity_cores=1))
    assert (found.value, found.status) == ("CPUs 3, 1 core", "note")


def test_caches() -> None:
    assert checks.caches(CPU).value == "L1d 48 KiB, L2 2048 KiB"
    assert checks.caches(replace(CPU, l1d=None, l2=None)).value == "not reported by this system"


@pytest.mark.parametrize(
    ("available", "limit", "stall", "status", "named"),
    [
        (32, None, None, "ok", "32.0 of 64.0 GiB"),
        (32, None, 50.0, "problem", "50 % of the time"),
        (6, None, 0.0, "problem", "6.0 of 64.0 GiB"),
        (6, 8, 0.0, "ok", "limit of the container"),
        (0.5, 8, 0.0, "problem", "limit of the container"),
    ],
)
def test_memory(available: float, limit: int | None, stall: float | None, status: str, named: str) -> None:
    limit_bytes = None if limit is None else limit * GIB
    cpu = replace(CPU, memory_available=int(available * GIB), cgroup_memory_limit=limit_bytes)
    found = checks.memory(cpu, stall)
    assert found.status == status
    assert named in found.value
    assert bool(found.fix) == (status == "problem")


def test_numa() -> None:
    assert checks.numa(CPU).value == "1 node"
    assert checks.numa(replace(CPU, numa_nodes=2, affinity_nodes=1)).status == "ok"
    assert "numactl" in checks.numa(replace(CPU, numa_nodes=2, affinity_nodes=2)).fix


def test_huge_pages() -> None:
    madvise = replace(CPU, transparent_hugepages="madvise")
    assert checks.huge_pages(CPU, {}).status == "ok"
    assert "THP_MEM_ALLOC_ENABLE=1" in checks.huge_pages(madvise, {}).fix
    assert checks.huge_pages(madvise, {"THP_MEM_ALLOC_ENABLE": "1"}).status == "ok"
    assert checks.huge_pages(replace(CPU, transparent_hugepages="never"), {}).status == "note"


def test_allocator() -> None:
    kept = HeapStatus(True, GIB, "")
    assert "keep_heap()" in checks.allocator("glibc", replace(kept, kept=False)).fix
    assert checks.allocator("glibc", kept).status == "ok"
    assert checks.allocator("jemalloc", replace(kept, kept=False)).status == "ok"


def test_compiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"PATH": str(tmp_path)}
    off = checks.compiling(environ)
    assert off.status == "note"
    assert off.value == "torch.compile generates no code: no C++ compiler found"
    assert "g++" in off.fix
    for name in ("clang++", "g++", "my-cc"):
        (tmp_path / name).touch(mode=0o755)
        found = checks.compiling(environ | ({"CXX": "my-cc -O3"} if name == "my-cc" else {}))
        assert found == checks.Check("compiling", f"on request, with {tmp_path / name}")
    monkeypatch.setattr(versions, "VERSIONS", {"2.1": versions.Names()})
    unknown = checks.compiling(environ)
    assert unknown.status == "note"
    assert unknown.value.startswith(
        f"torch.compile runs without passes: torch {torch.__version__} is not among"
    )
    assert "version of torch" in unknown.fix


def test_folder_that_does_not_exist_yet(tmp_path: Path) -> None:
    found = checks.folder(tmp_path / "not/yet/there")
    assert found.status == "ok"
    assert os.listdir(tmp_path) == []


def test_folder_that_is_not_writable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = checks.folder(tmp_path / "file" / "below")
    assert found.status == "problem"
    assert "HF_CPU_ACCEL_HOME" in found.fix


def test_packages_that_fail_to_import(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(packages, "import_failures", lambda: {"torchvision": "RuntimeError: no operator [nms]"})
    code, output = run()
    assert code == 0  # it makes nothing slow
    assert "torchvision fails to import (RuntimeError: no operator [nms])" in output
    assert "Install versions that fit each other" in output


@pytest.mark.parametrize(
    ("statement", "error"),
    [
        ("raise SystemError('built for\\nanother torch')", "SystemError: built for\nanother torch"),
        (
            "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise ImportError('?') from error",
            "ZeroDivisionError: division by zero",
        ),
        ("print('loads'); import os; os._exit(3)", "its import ended the process with code 3"),
    ],
)
def test_the_import_of_a_package_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, statement: str, error: str
) -> None:
    (tmp_path / "torchvision.py").write_text(statement)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert packages.import_failures(["torchvision"]) == {"torchvision": error}


def test_packages_that_are_absent_or_can_be_imported_are_not_listed() -> None:
    assert packages.import_failures(["torchvision", "accelerate"]) == {}


def test_help_lists_the_commands() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    for name in ("doctor", "bench", "demo"):
        assert name in result.output


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    number = doctor.versions()["hf_cpu_accel"]
    assert result.output.strip() == (number or "not installed, runs from its source folder")
