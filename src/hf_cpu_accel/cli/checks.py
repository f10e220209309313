"""The checks of `doctor`: one function per subject. Each turns plain facts into a `Check`."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hf_cpu_accel.compiler.torch_private import unknown_version
from hf_cpu_accel.runtime import private_files as private
from hf_cpu_accel.runtime.hardware import EMULATED_AMX, ISA_VARIABLE, TIERS, CPUInfo, tiers_of
from hf_cpu_accel.runtime.home_folder import HOME_VARIABLE, REMEDY
from hf_cpu_accel.runtime.topology import format_cpu_list

if TYPE_CHECKING:
    from hf_cpu_accel.extension import ExtensionStatus
    from hf_cpu_accel.runtime.memory import HeapStatus
    from hf_cpu_accel.runtime.threads import ThreadChoice

_GIB = 1 << 30
_LITTLE_MEMORY = 0.1  # as a share of the limit
_STALLED = 5.0  # percent of the time


@dataclass(frozen=True)
class Check:
    """One line of the report. A "problem" makes inference slow or fail; a "note" is information."""

    name: str
    value: str
    status: Literal["ok", "note", "problem"] = "ok"
    fix: str = ""


def kernels(status: ExtensionStatus, cpu: CPUInfo, built: Sequence[str] = ()) -> Check:
    """Check that the native kernels are loaded, at the best tier of the CPU; `built` are the tiers of the extension."""
    if not status.loaded:
        return Check(
            "kernels",
            f"not loaded: {status.error}. Plain PyTorch ops run instead, so models do not get faster",
            "problem",
            "Install a C++ compiler (Debian, Ubuntu: `apt-get install g++`), then install the package again. In a "
            "clone, `HF_CPU_ACCEL_REQUIRE_EXTENSION=1 pip install -e . --no-deps` shows the compiler's errors.",
        )
    if status.without_tiles and cpu.tier in ("amx", EMULATED_AMX):
        return Check(
            "kernels",
            f"native, {status.tier}, not {cpu.tier}: {status.without_tiles}",
            "problem",
            "Allow AMX in the container, its seccomp profile or the hypervisor. Until then the next lower tier runs.",
        )
    partial = f"; built for {', '.join(built)} only" if built and set(tiers_of(cpu.arch)) - set(built) else ""
    order = (*TIERS, EMULATED_AMX)
    if status.tier in order and order.index(status.tier) < order.index(cpu.tier):
        return Check(
            "kernels",
            f"native, {status.tier}, although this CPU can run {cpu.tier}{partial}",
            "problem",
            "Build all tiers: run `make kernels` in a clone, or install the package again without the variable HF_CPU_ACCEL_TIERS.",
        )
    return Check("kernels", f"native, {status.tier}{partial}")


def tier(cpu: CPUInfo) -> Check:
    """Check that the environment does not cap the instruction tier of the CPU."""
    if cpu.tier != cpu.uncapped_tier:
        return Check(
            "instruction tier",
            f"{cpu.tier}, although this CPU can run {cpu.uncapped_tier}",
            "problem",
            f"{ISA_VARIABLE} caps it: `unset {ISA_VARIABLE}`.",
        )
    if cpu.tier == TIERS[0] and cpu.arch in ("x86_64", "AMD64"):
        note = "This CPU or its hypervisor does not report AVX2, so the kernels use short vectors."
        return Check("instruction tier", cpu.tier, "note", note)
    return Check("instruction tier", cpu.tier)


def processor(cpu: CPUInfo) -> Check:
    """Report the name of the CPU and the number of its cores."""
    size = f"{_count(cpu.physical_cores, 'core')}, {_count(cpu.logical_cores, 'logical CPU')}"
    return Check("CPU", f"{cpu.model_name} ({cpu.arch}), {size}")


def threads(choice: ThreadChoice, cpu: CPUInfo) -> Check:
    """Compare the number of threads in use with the best number for this machine and its limits."""
    fixes = {
        "environment": f"`export OMP_NUM_THREADS={cpu.threads}`, or unset it (and MKL_NUM_THREADS).",
        "user": f"Call torch.set_num_threads({cpu.threads}), or remove that call.",
        "argument": f"Remove the argument threads, or pass threads={cpu.threads}.",
        "hardware": "",
    }
    if choice.count > cpu.threads:
        cost = f"{choice.reason}, but {cpu.thread_reason}; the surplus threads wait for each other"
        return Check("threads", cost, "problem", fixes[choice.source])
    if choice.count < cpu.threads:
        idle = f"{choice.reason}, but {cpu.threads} could run"
        return Check("threads", idle, "problem", fixes[choice.source])
    return Check("threads", choice.reason)


def quota(cpu: CPUInfo) -> Check:
    """Check the CPU quota of the container."""
    if cpu.cgroup_quota is None:
        return Check("CPU quota", "none")
    text = f"{cpu.cgroup_quota:g} CPUs"
    if cpu.cgroup_quota < 1:
        return Check(
            "CPU quota",
            text,
            "problem",
            "Give the container 1 CPU or more. With less, the kernel stops it for a part of each 100 ms.",
        )
    if cpu.cgroup_quota != int(cpu.cgroup_quota):
        note = "Use a whole number of CPUs. With a fraction, the kernel stops the last thread for a part of each 100 ms."
        return Check("CPU quota", text, "note", note)
    return Check("CPU quota", text)


def affinity(cpu: CPUInfo) -> Check:
    """Report the logical CPUs that this process may run on."""
    text = f"CPUs {format_cpu_list(cpu.affinity)}, {_count(cpu.affinity_cores, 'core')}"
    if len(cpu.affinity) < cpu.logical_cores:
        note = f"The machine has {cpu.logical_cores}; taskset, a cpuset or a job scheduler limits this process to these."
        return Check("affinity", text, "note", note)
    return Check("affinity", text)


def caches(cpu: CPUInfo) -> Check:
    """Report the cache sizes that the system exposes."""
    sizes = (("L1d", cpu.l1d, 1 << 10, "KiB"), ("L2", cpu.l2, 1 << 10, "KiB"), ("L3", cpu.l3, 1 << 20, "MiB"))
    texts = [f"{name} {size // unit} {suffix}" for name, size, unit, suffix in sizes if size is not None]
    return Check("caches", ", ".join(texts) or "not reported by this system")


def memory(cpu: CPUInfo, stall: float | None) -> Check:
    """Check the available memory of the machine, or of the container if its limit is lower.

    Args:
        cpu: the facts about this machine.
        stall: how long tasks waited for memory, in percent of the time; None if unknown.
    """
    ceiling = min(cpu.memory_total, cpu.cgroup_memory_limit or cpu.memory_total)
    limited = " (limit of the container)" if ceiling < cpu.memory_total else ""
    text = f"{cpu.memory_available / _GIB:.1f} of {ceiling / _GIB:.1f} GiB available{limited}"
    fix = "Stop other programs, or " + ("raise the container's memory limit." if limited else "add memory.")
    if stall is not None and stall > _STALLED:
        return Check("memory", f"{text}; tasks waited for memory {stall:g} % of the time", "problem", fix)
    if cpu.memory_available < _LITTLE_MEMORY * ceiling:
        return Check("memory", text, "problem", fix)
    return Check("memory", text)


def numa(cpu: CPUInfo) -> Check:
    """Check that this process runs on one NUMA node; reading from another node is slower."""
    if cpu.affinity_nodes > 1:
        note = "Run one process per node, which is faster: `numactl --cpunodebind=0 --membind=0 python ...`."
        spread = f"{_count(cpu.numa_nodes, 'node')}, this process runs on {cpu.affinity_nodes}"
        return Check("NUMA", spread, "note", note)
    return Check("NUMA", _count(cpu.numa_nodes, "node"))


def huge_pages(cpu: CPUInfo, environ: Mapping[str, str]) -> Check:
    """Check that transparent huge pages are on: one page fault per 2 MiB instead of 4 KiB."""
    mode = cpu.transparent_hugepages
    if mode == "madvise" and environ.get("THP_MEM_ALLOC_ENABLE") != "1":
        note = (
            "Set THP_MEM_ALLOC_ENABLE=1 before Python starts; torch then uses huge pages for large tensors."
        )
        return Check("huge pages", mode, "note", note)
    if mode == "never":
        note = "As root: `echo madvise > /sys/kernel/mm/transparent_hugepage/enabled`."
        return Check("huge pages", mode, "note", note)
    return Check("huge pages", mode)


def allocator(name: str, heap: HeapStatus) -> Check:
    """Report the allocator, and check that glibc reuses large blocks."""
    if name == "glibc" and not heap.kept:
        note = "Large outputs cost page faults. In a server, call hf_cpu_accel.runtime.memory.keep_heap() to avoid them."
        return Check("allocator", name, "note", note)
    return Check("allocator", name)


def compiling(environ: Mapping[str, str]) -> Check:
    """Report the compiler for torch.compile; the built kernels need none."""
    unknown, compiler = unknown_version(), _compiler(environ)
    if unknown is not None:
        fix = "Install a supported version of torch, or a newer hf_cpu_accel."
        return Check("compiling", f"torch.compile runs without passes: {unknown}", "note", fix)
    if compiler is None:
        fix = "Only torch.compile and export need one: `apt-get install g++`, or set CXX. The built kernels need none."
        return Check("compiling", "torch.compile generates no code: no C++ compiler found", "note", fix)
    return Check("compiling", f"on request, with {compiler}")


def _compiler(environ: Mapping[str, str]) -> str | None:
    """Return the path of the C++ compiler in CXX, else of g++ or clang++; None if there is none. Imports no Inductor.

    Inductor itself uses clang++ on Linux only if CXX names it.
    """
    names = filter(None, (environ.get("CXX"), "g++", "clang++"))
    paths = (shutil.which(name.split()[0], path=environ.get("PATH")) for name in names)
    return next(filter(None, paths), None)


def bfloat16(fast: bool) -> Check:
    """Report whether the CPU computes bfloat16 faster than float32, which decides `dtype="auto"`."""
    return Check(
        "bfloat16", "native dot products, faster than float32" if fast else "not faster than float32"
    )


def folder(path: Path) -> Check:
    """Check that this user, and no other, can write to the folder of the package, or to its nearest existing parent."""
    reason = private.problem(path.resolve())
    if reason is not None:
        return Check("folder", f"nothing is stored in {path}: {reason}", "problem", REMEDY)
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            return Check("folder", f"{path}, {shutil.disk_usage(existing).free / _GIB:.0f} GiB free")
    except (
        OSError
    ) as error:  # permissions do not show it: root may write everywhere except on a read-only disk
        fix = f"Set {HOME_VARIABLE} to a folder on disk that you may write to."
        return Check("folder", f"{path} is not writable: {error.strerror}", "problem", fix)


def imports(failures: Mapping[str, str]) -> Check:
    """Check that all installed host packages can be imported; `failures` are from `packages.import_failures`."""
    if not failures:
        return Check("imports", "all installed host packages can be imported")
    text = "; ".join(f"{file} fails to import ({error})" for file, error in failures.items())
    fix = (
        "Install versions that fit each other and this torch, or uninstall the package. Models that do not use it "
        "are still accelerated."
    )
    return Check("imports", text, "note", fix)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
