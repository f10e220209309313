"""The CPU under this process: instruction tier, cores it may use, caches, memory, and its thread count.

``detect()`` reads each fact once, in a few milliseconds, without importing torch. ``measure_peaks()`` runs
for seconds and is only for those who ask.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import psutil

from hf_cpu_accel.runtime import cgroup, memory, topology

ISA_VARIABLE = "HF_CPU_ACCEL_ISA"

# From the lowest to the highest. avx2_vnni is a separate branch: many CPUs with AVX-512 lack the flag avx_vnni.
_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"}
_AVX512_BF16 = _AVX512 | {"avx512_vnni", "avx512_bf16"}
_NEON_DOTPROD = frozenset({"asimddp"})
_TIER_FLAGS: dict[str, frozenset[str]] = {
    "generic": frozenset(),
    "avx2": _AVX2,
    "avx2_vnni": _AVX2 | {"avx_vnni"},
    "avx512": _AVX512,
    "avx512_vnni": _AVX512 | {"avx512_vnni"},
    "avx512_bf16": _AVX512_BF16,
    "amx": _AVX512_BF16 | {"amx_tile", "amx_bf16", "amx_int8"},
    "neon_dotprod": _NEON_DOTPROD,
    "neon_i8mm_bf16": _NEON_DOTPROD | {"i8mm", "bf16"},
}
TIERS: tuple[str, ...] = tuple(_TIER_FLAGS)
# By architecture: a tier of another architecture does not cap.
_ARM_TIERS = ("generic", "neon_dotprod", "neon_i8mm_bf16")
_X86_TIERS = tuple(tier for tier in TIERS if tier == "generic" or tier not in _ARM_TIERS)
# The kernels of amx emulated on a machine without it, only if named explicitly: slow, for tests.
EMULATED_AMX = "amx_emulated"


@dataclass(frozen=True)
class CPUInfo:
    """The hardware of this process. Sizes in bytes; ``None`` where unknown or unlimited.

    ``tier`` is the best of ``TIERS`` that the CPU runs and ``HF_CPU_ACCEL_ISA`` allows, ``uncapped_tier`` the
    best that it runs. ``physical_cores`` and ``logical_cores`` count the machine's; ``affinity`` lists the
    logical CPUs that this process may run on and ``affinity_cores`` counts the physical cores they belong to.
    ``cgroup_quota`` is in CPUs (1.5 = one and a half). ``l1d`` and ``l2`` are one core's share, ``l3`` is
    what one core reaches. ``numa_nodes`` counts the memory nodes with CPUs, ``affinity_nodes`` those of them
    that ``affinity`` touches.
    """

    model_name: str
    vendor: str
    arch: str
    flags: frozenset[str]
    tier: str
    uncapped_tier: str
    physical_cores: int
    logical_cores: int
    affinity: tuple[int, ...]
    affinity_cores: int
    cgroup_quota: float | None
    cgroup_memory_limit: int | None
    memory_total: int
    memory_available: int
    l1d: int | None
    l2: int | None
    l3: int | None
    numa_nodes: int
    affinity_nodes: int
    transparent_hugepages: str
    threads: int
    thread_reason: str


@dataclass(frozen=True)
class Peaks:
    """Measured limits: arithmetic in GFLOP/s (int8: GOP/s; a multiply-add counts as two), reads in GB/s."""

    float32: float
    bfloat16: float
    int8: float
    read_bandwidth: float
    threads: int


@lru_cache(maxsize=1)
def detect() -> CPUInfo:
    """Return the machine, read at the first call (including ``memory_available``); ``probe()`` reads it again.

    Raises:
        ValueError: ``HF_CPU_ACCEL_ISA`` is not a tier.
    """
    return probe()


def probe(
    root: Path = Path("/"),
    *,
    affinity: Iterable[int] | None = None,
    machine_memory: tuple[int, int] | None = None,
    environ: Mapping[str, str] | None = None,
) -> CPUInfo:
    """Read the machine from the files below ``root``.

    Args:
        root: ``/``, or a folder with another machine's ``/proc`` and ``/sys``.
        affinity: logical CPUs, instead of those of the process.
        machine_memory: total and available bytes, instead of those of the system.
        environ: instead of ``os.environ``.

    Raises:
        ValueError: ``HF_CPU_ACCEL_ISA`` is not a tier.
    """
    processor = topology.processor(root) or _foreign_processor()
    cap = (os.environ if environ is None else environ).get(ISA_VARIABLE)
    uncapped, tier = best_tier(processor.flags), best_tier(processor.flags, cap)

    allowed = frozenset(_affinity() if affinity is None else affinity)
    online = topology.online_cpus(root) | allowed
    affinity_cores = len(topology.cores(allowed, root))
    physical_cores = len(topology.cores(online, root))
    if not topology.online_cpus(root):  # not Linux: no topology to read, so let psutil ask the system
        physical_cores = psutil.cpu_count(logical=False) or len(online)
        affinity_cores = min(physical_cores, len(allowed))
    quota = cgroup.cpu_quota(root)
    threads, thread_reason = thread_limit(len(allowed), affinity_cores, quota)

    if machine_memory is None:
        virtual = psutil.virtual_memory()
        machine_memory = virtual.total, virtual.available
    total, available = machine_memory
    limit = cgroup.memory_limit(root)
    headroom = cgroup.memory_headroom(root)
    nodes = topology.numa_nodes(root)
    caches = topology.caches(min(allowed), root)
    return CPUInfo(
        model_name=processor.model_name,
        vendor=processor.vendor,
        arch=platform.machine(),
        flags=processor.flags,
        tier=tier,
        uncapped_tier=uncapped,
        physical_cores=physical_cores,
        logical_cores=len(online),
        affinity=tuple(sorted(allowed)),
        affinity_cores=affinity_cores,
        cgroup_quota=quota,
        cgroup_memory_limit=limit if limit is not None and limit < total else None,
        memory_total=total,
        memory_available=available if headroom is None else min(available, headroom),
        l1d=caches.l1d,
        l2=caches.l2,
        l3=caches.l3,
        numa_nodes=max(1, len(nodes)),
        affinity_nodes=max(1, sum(1 for cpus in nodes.values() if cpus & allowed)),
        transparent_hugepages=memory.transparent_hugepages(root),
        threads=threads,
        thread_reason=thread_reason,
    )


def best_tier(flags: Iterable[str], cap: str | None = None) -> str:
    """Return the highest of ``TIERS`` that a CPU with these ``flags`` supports, up to ``cap`` if it is of the same architecture.

    ``EMULATED_AMX``, which is not in ``TIERS``, is returned only if ``cap`` names it.

    Raises:
        ValueError: ``cap`` is not a tier.
    """
    available = frozenset(flags)
    if cap == EMULATED_AMX:
        return EMULATED_AMX if _TIER_FLAGS["avx512_vnni"] <= available else best_tier(available)
    if cap and cap not in TIERS:
        raise ValueError(
            f"{ISA_VARIABLE}={cap!r} is not an instruction tier; expected one of {', '.join(TIERS)}. "
            "Unset it to use the best tier that this CPU has."
        )
    above = {tier for own in (_X86_TIERS, _ARM_TIERS) if cap in own for tier in own[own.index(cap) + 1 :]}
    return [tier for tier in TIERS if tier not in above and _TIER_FLAGS[tier] <= available][-1]


def tiers_of(arch: str) -> tuple[str, ...]:
    """Return the tiers of an architecture (``platform.machine()``), from the lowest to the highest."""
    return {"x86_64": _X86_TIERS, "amd64": _X86_TIERS, "aarch64": _ARM_TIERS}.get(arch.lower(), TIERS[:1])


def thread_limit(affinity: int, cores: int, quota: float | None) -> tuple[int, str]:
    """Return (threads, the reason): min(affinity, ceil(quota), cores), at least 1.

    Two threads on one core share its multipliers, so hardware threads beyond ``cores`` gain nothing. Threads beyond the quota slow
    down all threads, because the kernel stops them for the rest of each period.
    """
    quota_threads = math.inf if quota is None else max(1, math.ceil(quota))
    count = int(max(1, min(affinity, cores, quota_threads)))
    if quota_threads < min(affinity, cores):
        return count, (
            f"{count} because the control group (container) grants {quota:g} CPUs "
            f"of the {cores} cores that this process may use"
        )
    if cores < affinity:
        reason = f"the {affinity} logical CPUs that this process may use are {cores} physical cores"
        return count, f"{count} because {reason}"
    return count, f"{count}, one per core that this process may use"


def lacks_vnni() -> bool:
    """Return whether the kernels multiply bytes by instructions of AVX2 or AVX-512 that are older than VNNI."""
    from hf_cpu_accel import extension

    return extension.status().tier in ("avx2", "avx512")


def native_bf16_is_fast() -> bool:
    """Return whether the kernels' bfloat16 dot products are faster than float32 on this CPU; False without kernels."""
    from hf_cpu_accel import extension

    return extension.status().bf16_dot


def measure_peaks(threads: int | None = None) -> Peaks:
    """Measure arithmetic and read bandwidth on ``threads`` threads, by default ``detect().threads``.

    It takes seconds, on an idle machine.

    Raises:
        RuntimeError: the native kernels are not loaded.
        ValueError: ``threads`` is below 1.
    """
    import torch

    ops = torch.ops.hf_cpu_accel
    with _probing(threads) as count:
        return Peaks(
            float32=float(ops.measure_flops("float32", count)),
            bfloat16=float(ops.measure_flops("bfloat16", count)),
            int8=float(ops.measure_flops("int8", count)),
            read_bandwidth=float(ops.measure_read_bandwidth(count, _beyond_caches())),
            threads=count,
        )


def measure_read_bandwidth(threads: int | None = None) -> float:
    """Measure only the read bandwidth, in GB/s, in about a second; errors as in ``measure_peaks``."""
    import torch

    with _probing(threads) as count:
        return float(torch.ops.hf_cpu_accel.measure_read_bandwidth(count, _beyond_caches()))


@contextlib.contextmanager
def _probing(threads: int | None) -> Iterator[int]:
    """Check the arguments, and set torch's threads inside, which the ops use."""
    import torch

    from hf_cpu_accel import extension

    cpu = detect()
    threads = cpu.threads if threads is None else threads
    if threads < 1:
        raise ValueError(f"threads={threads}: expected at least 1, or omit it for {cpu.threads}")
    status = extension.status()
    if not status.loaded:
        raise RuntimeError(
            f"peaks are measured by the native kernels, which are not loaded: {status.error}. "
            "Run `hf-cpu-accel doctor` to find out why."
        )
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield threads
    finally:
        torch.set_num_threads(before)


def _beyond_caches() -> int:
    """Return a size in megabytes far beyond the last cache level, so that memory is measured, without swapping."""
    wanted = 4 * (detect().l3 or 64 << 20)
    return max(64, min(wanted, psutil.virtual_memory().available // 4) >> 20)


def _affinity() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(psutil.cpu_count(logical=True) or 1))


def _foreign_processor() -> topology.Processor:
    """Read the processor by py-cpuinfo, if there is no ``/proc/cpuinfo``; it starts processes and takes a second."""
    import cpuinfo

    info = cpuinfo.get_cpu_info()
    return topology.Processor(
        info.get("brand_raw", "unknown"),
        info.get("vendor_id_raw", "unknown"),
        frozenset(info.get("flags", ())),
    )
