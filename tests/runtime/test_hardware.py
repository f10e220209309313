"""Facts about machines, read from fake `/proc` and `/sys` trees; and this machine, whatever it is."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_cpu_accel import extension
from hf_cpu_accel.runtime import hardware
from tests.children import run_child

AVX2 = {"avx2", "fma", "f16c"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"}
ZEN4 = AVX512 | {"avx512_vnni", "avx512_bf16"}
NEOVERSE = {"asimd", "asimddp", "i8mm", "bf16"}
SAPPHIRE_RAPIDS = ZEN4 | {"avx_vnni", "amx_tile", "amx_bf16", "amx_int8"}
CPU = "sys/devices/system/cpu"


def machine(root: Path, flags: set[str], *, cores: int = 4, smt: int = 2, quota: str = "max 100000") -> Path:
    """A machine of two nodes in a version 2 container; logical CPUs of one core are ``cores`` apart."""
    total = cores * smt
    record = "processor : {}\nvendor_id : GenuineIntel\nmodel name : Fake\nflags : " + " ".join(sorted(flags))
    files = {
        "proc/cpuinfo": "\n\n".join(record.format(cpu) for cpu in range(total)),
        "proc/self/cgroup": "0::/",
        "proc/self/mountinfo": "31 23 0:29 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw",
        "sys/fs/cgroup/cpu.max": quota,
        "sys/fs/cgroup/memory.max": "4000",
        "sys/fs/cgroup/memory.current": "1000",
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
        "sys/devices/system/node/node0/cpulist": f"0-{total // 2 - 1}",
        "sys/devices/system/node/node1/cpulist": f"{total // 2}-{total - 1}",
        f"{CPU}/online": f"0-{total - 1}",
        f"{CPU}/cpu0/cache/index2/level": "2",
        f"{CPU}/cpu0/cache/index2/type": "Unified",
        f"{CPU}/cpu0/cache/index2/size": "2048K",
    }
    for cpu in range(total):
        siblings = ",".join(str(cpu % cores + cores * thread) for thread in range(smt))
        files[f"{CPU}/cpu{cpu}/topology/core_cpus_list"] = siblings
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    ("flags", "tier"),
    [
        pytest.param(set(), "generic", id="old"),
        pytest.param({"asimd", "i8mm", "bf16"}, "generic", id="arm-without-dot-products"),
        pytest.param({"asimd", "asimddp"}, "neon_dotprod", id="graviton2-altra"),
        pytest.param({"asimddp", "i8mm"}, "neon_dotprod", id="i8mm-without-bf16-is-no-tier"),
        pytest.param(NEOVERSE, "neon_i8mm_bf16", id="graviton3-axion-cobalt"),
        pytest.param({"avx2", "fma"}, "generic", id="avx2-without-f16c"),
        pytest.param(AVX2, "avx2", id="haswell-zen3"),
        pytest.param(AVX2 | {"avx_vnni"}, "avx2_vnni", id="alder-lake-n100"),
        pytest.param({"avx_vnni"}, "generic", id="vnni-without-avx2-is-no-tier"),
        pytest.param(AVX2 | {"avx512f", "avx512cd"}, "avx2", id="knights-landing"),
        pytest.param(AVX512, "avx512", id="skylake-x"),
        pytest.param(AVX512 | {"avx512_vnni"}, "avx512_vnni", id="cascade-lake"),
        pytest.param(AVX512 | {"avx512_bf16"}, "avx512", id="bf16-without-vnni-is-no-tier"),
        pytest.param(ZEN4, "avx512_bf16", id="zen4-cooper-lake"),
        pytest.param(SAPPHIRE_RAPIDS, "amx", id="sapphire-rapids"),
    ],
)
def test_best_tier(flags: set[str], tier: str) -> None:
    assert hardware.best_tier(flags) == tier


@given(st.frozensets(st.sampled_from(sorted(SAPPHIRE_RAPIDS))), st.sampled_from(sorted(SAPPHIRE_RAPIDS)))
def test_more_flags_never_lower_the_tier(flags: frozenset[str], extra: str) -> None:
    order = hardware.TIERS.index
    assert order(hardware.best_tier(flags)) <= order(hardware.best_tier(flags | {extra}))


@given(st.frozensets(st.sampled_from(sorted(SAPPHIRE_RAPIDS))), st.sampled_from(hardware.TIERS))
def test_cap_is_never_passed_and_never_below_what_it_allows(flags: frozenset[str], cap: str) -> None:
    order = hardware.TIERS.index
    best, capped = hardware.best_tier(flags), hardware.best_tier(flags, cap)
    assert order(capped) <= order(cap)
    if order(best) <= order(cap):
        assert capped == best


@pytest.mark.parametrize(
    ("flags", "cap", "tier"),
    [
        pytest.param(SAPPHIRE_RAPIDS, "avx512", "avx512", id="the-cap"),
        pytest.param(AVX2 | {"avx_vnni"}, "avx512", "avx2_vnni", id="laptop-capped-above-it"),
        pytest.param(ZEN4, "avx2_vnni", "avx2", id="avx512-without-256-bit-vnni"),
        pytest.param(AVX512, "amx", "avx512", id="cap-above-the-cpu"),
        pytest.param(AVX512, "", "avx512", id="empty-is-no-cap"),
        pytest.param(AVX512, None, "avx512", id="none-is-no-cap"),
        pytest.param(ZEN4, "amx_emulated", "amx_emulated", id="emulated-where-asked-for"),
        pytest.param(SAPPHIRE_RAPIDS, "amx_emulated", "amx_emulated", id="emulated-beside-the-hardware"),
        pytest.param(AVX2, "amx_emulated", "avx2", id="emulated-needs-vnni"),
        pytest.param(NEOVERSE, "neon_dotprod", "neon_dotprod", id="the-cap-on-arm"),
        pytest.param(NEOVERSE, "generic", "generic", id="generic-on-arm"),
        pytest.param(NEOVERSE, "avx2", "neon_i8mm_bf16", id="cap-of-x86-on-arm"),
        pytest.param(AVX512, "neon_dotprod", "avx512", id="cap-of-arm-on-x86"),
    ],
)
def test_cap(flags: set[str], cap: str | None, tier: str) -> None:
    assert hardware.best_tier(flags, cap) == tier


@pytest.mark.parametrize("cap", ["AVX2", "avx512f", "sse4", " avx2"])
def test_unknown_cap_lists_the_tiers(cap: str) -> None:
    with pytest.raises(ValueError, match="generic, avx2, avx2_vnni, avx512, avx512_vnni, avx512_bf16, amx"):
        hardware.best_tier(AVX512, cap)


@given(st.integers(1, 512), st.integers(1, 512), st.none() | st.floats(0.01, 600))
def test_thread_limit_is_within_every_limit(affinity: int, cores: int, quota: float | None) -> None:
    cores = min(cores, affinity)
    count, reason = hardware.thread_limit(affinity, cores, quota)
    assert 1 <= count <= cores
    assert quota is None or count == 1 or count < quota + 1
    assert reason.startswith(f"{count}")


@pytest.mark.parametrize(
    ("affinity", "cores", "quota", "count", "because"),
    [
        (64, 32, 2.0, 2, "container"),
        (64, 32, 1.5, 2, "grants 1.5 CPUs"),
        (8, 8, 0.25, 1, "container"),
        (8, 4, None, 4, "8 logical CPUs that this process may use are 4 physical cores"),
        (8, 4, 16.0, 4, "physical cores"),
        (2, 2, 2.0, 2, "one per core"),
    ],
)
def test_thread_limit_says_why(
    affinity: int, cores: int, quota: float | None, count: int, because: str
) -> None:
    found, reason = hardware.thread_limit(affinity, cores, quota)
    assert found == count
    assert because in reason


def test_probe_of_a_container(tmp_path: Path) -> None:
    root = machine(tmp_path, SAPPHIRE_RAPIDS, quota="150000 100000")
    cpu = hardware.probe(
        root, affinity={0, 1, 4}, machine_memory=(8000, 7000), environ={"HF_CPU_ACCEL_ISA": "avx512_vnni"}
    )
    assert (cpu.tier, cpu.uncapped_tier, cpu.model_name) == ("avx512_vnni", "amx", "Fake")
    assert (cpu.physical_cores, cpu.logical_cores) == (4, 8)
    assert (cpu.affinity, cpu.affinity_cores) == ((0, 1, 4), 2)
    assert (cpu.cgroup_quota, cpu.threads) == (1.5, 2)
    assert (cpu.cgroup_memory_limit, cpu.memory_total, cpu.memory_available) == (4000, 8000, 3000)
    assert (cpu.l1d, cpu.l2, cpu.l3) == (None, 2 << 20, None)
    assert (cpu.numa_nodes, cpu.affinity_nodes) == (2, 2)
    assert cpu.transparent_hugepages == "madvise"


def test_affinity_to_the_two_threads_of_one_core(tmp_path: Path) -> None:
    cpu = hardware.probe(machine(tmp_path, AVX2), affinity={0, 4}, machine_memory=(8000, 7000), environ={})
    assert (cpu.affinity_cores, cpu.threads) == (1, 1)


def test_limit_above_the_machine_is_no_limit(tmp_path: Path) -> None:
    cpu = hardware.probe(machine(tmp_path, AVX2), affinity={0}, machine_memory=(3000, 500), environ={})
    assert (cpu.cgroup_memory_limit, cpu.memory_available) == (None, 500)


def test_unknown_cap_in_the_environment(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="HF_CPU_ACCEL_ISA='fast' is not an instruction tier"):
        hardware.probe(machine(tmp_path, AVX2), affinity={0}, environ={"HF_CPU_ACCEL_ISA": "fast"})


def test_system_without_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS and Windows: py-cpuinfo and psutil answer."""
    answer = {"brand_raw": "Apple M2", "vendor_id_raw": "Apple"}
    monkeypatch.setitem(sys.modules, "cpuinfo", SimpleNamespace(get_cpu_info=lambda: answer))
    monkeypatch.setattr(hardware.psutil, "cpu_count", lambda logical: 8 if logical else 4)
    cpu = hardware.probe(tmp_path, affinity=range(8), machine_memory=(8000, 7000), environ={})
    assert (cpu.model_name, cpu.tier, cpu.physical_cores, cpu.threads) == ("Apple M2", "generic", 4, 4)
    assert (cpu.numa_nodes, cpu.cgroup_quota, cpu.transparent_hugepages) == (1, None, "unknown")


def test_this_machine() -> None:
    cpu = hardware.probe(environ={})
    assert 1 <= cpu.threads <= cpu.affinity_cores <= cpu.physical_cores <= cpu.logical_cores
    assert set(cpu.affinity) == os.sched_getaffinity(0)
    assert 0 < cpu.memory_available <= cpu.memory_total


def test_detect_looks_once() -> None:
    assert hardware.detect() is hardware.detect()


LONELY_DETECTION = """
import subprocess, sys, time, types
subprocess.Popen = None
package = types.ModuleType("hf_cpu_accel")  # without its __init__, which may import what it likes
package.__path__ = [sys.argv[1]]
sys.modules["hf_cpu_accel"] = package
from hf_cpu_accel.runtime import hardware
start = time.perf_counter()
hardware.detect()
print(time.perf_counter() - start, "torch" in sys.modules, "cpuinfo" in sys.modules)
"""


def test_detection_is_quick_and_needs_neither_torch_nor_a_child_process() -> None:
    done = run_child(
        [sys.executable, "-c", LONELY_DETECTION, str(Path(hardware.__file__).parents[1])], check=True
    )
    took, torch_imported, cpuinfo_imported = done.stdout.split()
    assert float(took) < 1.0
    assert (torch_imported, cpuinfo_imported) == ("False", "False")


def test_native_bf16_follows_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for fast in (False, True):
        monkeypatch.setattr(extension, "status", lambda fast=fast: SimpleNamespace(bf16_dot=fast))
        assert hardware.native_bf16_is_fast() is fast


@pytest.mark.parametrize(
    ("tier", "lacks"),
    [
        ("generic", False),
        ("avx2", True),
        ("avx2_vnni", False),
        ("avx512", True),
        ("amx", False),
        (None, False),
    ],
)
def test_tiers_without_vnni(tier: str | None, lacks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "status", lambda: SimpleNamespace(tier=tier))
    assert hardware.lacks_vnni() is lacks


def test_peaks_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "status", lambda: SimpleNamespace(loaded=False, error="no such file"))
    with pytest.raises(RuntimeError, match=r"not loaded: no such file.*doctor"):
        hardware.measure_peaks(1)


def test_peaks_of_no_threads() -> None:
    with pytest.raises(ValueError, match="threads=0"):
        hardware.measure_peaks(0)


def test_peaks_run_on_the_threads_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def probe(*arguments: object) -> float:
        seen.append(torch.get_num_threads())
        return 1.0

    monkeypatch.setattr(extension, "status", lambda: SimpleNamespace(loaded=True, error=None))
    for name in ("measure_flops", "measure_read_bandwidth"):
        monkeypatch.setattr(torch.ops.hf_cpu_accel, name, probe, raising=False)
    before = torch.get_num_threads()
    assert hardware.measure_peaks(before + 1) == hardware.Peaks(1.0, 1.0, 1.0, 1.0, before + 1)
    assert set(seen) == {before + 1}
    assert torch.get_num_threads() == before


def test_real_peaks_are_those_of_a_cpu() -> None:
    if not extension.status().loaded:
        with pytest.raises(RuntimeError, match="not loaded"):
            hardware.measure_peaks(1)
        return
    peaks = hardware.measure_peaks(1)
    # A core has at most two 512-bit units and 6 GHz: 384 float32, 768 bfloat16, 1536 int8 operations per ns. AMX multiplies
    # 16 rows by 64 bytes by 16 columns in 16 cycles, eight times as much.
    tiles = 8 if extension.status().tier == "amx" else 1
    assert 0.1 < peaks.float32 < 400
    assert 0.1 < peaks.bfloat16 < 800 * tiles
    assert 0.1 < peaks.int8 < 1600 * tiles
    assert 0.5 < peaks.read_bandwidth < 500


def test_read_bandwidth_alone_runs_on_the_threads_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="threads=0"):
        hardware.measure_read_bandwidth(0)
    monkeypatch.setattr(extension, "status", lambda: SimpleNamespace(loaded=True, error=None))
    probe = lambda threads, megabytes: 10.0 * threads + torch.get_num_threads()  # noqa: E731
    monkeypatch.setattr(torch.ops.hf_cpu_accel, "measure_read_bandwidth", probe, raising=False)
    before = torch.get_num_threads()
    assert hardware.measure_read_bandwidth(before + 1) == 11.0 * (before + 1)
    assert torch.get_num_threads() == before


def test_the_former_name_warns_with_the_new_one() -> None:
    from hf_cpu_accel import hardware as former

    with pytest.warns(DeprecationWarning, match=r"use hf_cpu_accel\.runtime\.hardware"):
        assert former.detect is hardware.detect
