"""What ``doctor`` looks at: one function per subject, each from plain facts to a ``Check``."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hf_cpu_accel.compiler.background import toolchain
from hf_cpu_accel.runtime import private_files as private
from hf_cpu_accel.runtime.hardware import EMULATED_AMX, ISA_VARIABLE, TIERS, CPUInfo, tiers_of
from hf_cpu_accel.runtime.home_folder import HOME_VARIABLE, REMEDY
from hf_cpu_accel.runtime.topology import format_cpu_list

if TYPE_CHECKING:
    from hf_cpu_accel.extension import ExtensionStatus
    from hf_cpu_accel.runtime.memory import HeapStatus
    from hf_cpu_accel.runtime.threads import ThreadChoice

_GIB = 1 << 30
_LITTLE_MEMORY = 0.1  # of what the process may have
_STALLED = 5.0  # percent of the time


@dataclass(frozen=True)
class Check:
    """One line of the report. A "problem" costs speed or gets in the way; a "note" is worth knowing."""

    name: str
    value: str
    status: Literal["ok", "note", "problem"] = "ok"
    fix: str = ""


def kernels(status: ExtensionStatus, cpu: CPUInfo, built: Sequence[str] = ()) -> Check:
    """Return whether the native kernels run and at which tier; and, where some are missing, which tiers were `built`."""
    if not status.loaded:
        return Check(
            "kernels",
            f"not loaded: {status.error}. Plain torch serves, so nothing gets faster",
            "problem",
            "Have a C++ compiler (Debian, Ubuntu: `apt-get install g++`) and install the package again. In a "
            "clone, `HF_CPU_ACCEL_REQUIRE_EXTENSION=1 pip install -e . --no-deps` shows what it says.",
        )
    if status.without_tiles and cpu.tier in ("amx", EMULATED_AMX):
        return Check(
            "kernels",
            f"native, {status.tier}, not {cpu.tier}: {status.without_tiles}",
            "problem",
            "Let the container, its seccomp profile or the hypervisor allow AMX; until then the tier below serves.",
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
    """The instruction tier of the CPU, and whether the environment holds it back."""
    if cpu.tier != cpu.uncapped_tier:
        return Check(
            "instruction tier",
            f"{cpu.tier}, although this CPU can run {cpu.uncapped_tier}",
            "problem",
            f"{ISA_VARIABLE} holds it back: `unset {ISA_VARIABLE}`.",
        )
    if cpu.tier == TIERS[0] and cpu.arch in ("x86_64", "AMD64"):
        note = "This CPU, or its hypervisor, shows no AVX2, so vectors are short."
        return Check("instruction tier", cpu.tier, "note", note)
    return Check("instruction tier", cpu.tier)


def processor(cpu: CPUInfo) -> Check:
    """The CPU's name and size."""
    size = f"{_count(cpu.physical_cores, 'core')}, {_count(cpu.logical_cores, 'logical CPU')}"
    return Check("CPU", f"{cpu.model_name} ({cpu.arch}), {size}")


def threads(choice: ThreadChoice, cpu: CPUInfo) -> Check:
    """The thread count in use against the one that the limits allow."""
    fixes = {
        "environment": f"`export OMP_NUM_THREADS={cpu.threads}`, or unset it (and MKL_NUM_THREADS).",
        "user": f"Call torch.set_num_threads({cpu.threads}), or leave that call out.",
        "argument": f"Leave threads out, or pass threads={cpu.threads}.",
        "hardware": "",
    }
    if choice.count > cpu.threads:
        cost = f"{choice.reason}, but {cpu.thread_reason}; the surplus threads wait for each other"
        return Check("threads", cost, "problem", fixes[choice.source])
    if choice.count < cpu.threads:
        idle = f"{choice.reason}; {cpu.threads} could run"
        return Check("threads", idle, "problem", fixes[choice.source])
    return Check("threads", choice.reason)


def quota(cpu: CPUInfo) -> Check:
    """The CPU time that the container grants."""
    if cpu.cgroup_quota is None:
        return Check("CPU quota", "none")
    text = f"{cpu.cgroup_quota:g} CPUs"
    if cpu.cgroup_quota < 1:
        return Check(
            "CPU quota",
            text,
            "problem",
            "Give the container 1 CPU or more: now the kernel stops it for part of each 100 ms.",
        )
    if cpu.cgroup_quota != int(cpu.cgroup_quota):
        note = "A whole number of CPUs avoids that the last thread is stopped for part of each 100 ms."
        return Check("CPU quota", text, "note", note)
    return Check("CPU quota", text)


def affinity(cpu: CPUInfo) -> Check:
    """The logical CPUs that this process may run on."""
    text = f"CPUs {format_cpu_list(cpu.affinity)}, {_count(cpu.affinity_cores, 'core')}"
    if len(cpu.affinity) < cpu.logical_cores:
        note = f"The machine has {cpu.logical_cores}: taskset, a cpuset or a job scheduler chose these."
        return Check("affinity", text, "note", note)
    return Check("affinity", text)


def caches(cpu: CPUInfo) -> Check:
    """Cache sizes, where the system shows them."""
    sizes = (("L1d", cpu.l1d, 1 << 10, "KiB"), ("L2", cpu.l2, 1 << 10, "KiB"), ("L3", cpu.l3, 1 << 20, "MiB"))
    known = [f"{name} {size // unit} {suffix}" for name, size, unit, suffix in sizes if size is not None]
    return Check("caches", ", ".join(known) or "not shown by this system")


def memory(cpu: CPUInfo, stall: float | None) -> Check:
    """Memory left, of the machine or of the container if that is less; ``stall`` in percent of the time."""
    ceiling = min(cpu.memory_total, cpu.cgroup_memory_limit or cpu.memory_total)
    limited = " (limit of the container)" if ceiling < cpu.memory_total else ""
    text = f"{cpu.memory_available / _GIB:.1f} of {ceiling / _GIB:.1f} GiB available{limited}"
    fix = "End other programs, or " + ("raise the container's memory limit." if limited else "add memory.")
    if stall is not None and stall > _STALLED:
        return Check("memory", f"{text}; tasks waited for memory {stall:g} % of the time", "problem", fix)
    if cpu.memory_available < _LITTLE_MEMORY * ceiling:
        return Check("memory", text, "problem", fix)
    return Check("memory", text)


def numa(cpu: CPUInfo) -> Check:
    """Memory nodes: reading from another one is slower."""
    if cpu.affinity_nodes > 1:
        note = "One process per node is faster: `numactl --cpunodebind=0 --membind=0 python ...`."
        spread = f"{_count(cpu.numa_nodes, 'node')}, this process runs on {cpu.affinity_nodes}"
        return Check("NUMA", spread, "note", note)
    return Check("NUMA", _count(cpu.numa_nodes, "node"))


def huge_pages(cpu: CPUInfo, environ: Mapping[str, str]) -> Check:
    """Transparent huge pages: one page fault per 2 MiB instead of 4 KiB."""
    mode = cpu.transparent_hugepages
    if mode == "madvise" and environ.get("THP_MEM_ALLOC_ENABLE") != "1":
        note = "Set THP_MEM_ALLOC_ENABLE=1 before Python starts: torch then asks for them for large tensors."
        return Check("huge pages", mode, "note", note)
    if mode == "never":
        note = "As root: `echo madvise > /sys/kernel/mm/transparent_hugepage/enabled`."
        return Check("huge pages", mode, "note", note)
    return Check("huge pages", mode)


def allocator(name: str, heap: HeapStatus) -> Check:
    """Who serves malloc, and whether large blocks are kept for reuse."""
    if name == "glibc" and not heap.kept:
        note = (
            "Large outputs cost page faults; a server avoids them by hf_cpu_accel.runtime.memory.keep_heap()."
        )
        return Check("allocator", name, "note", note)
    return Check("allocator", name)


def compiling(environ: Mapping[str, str]) -> Check:
    """What compile= and torch.compile would use; the kernels need no compiler once built."""
    off = toolchain.why_off(environ)
    if off is None:
        return Check("compiling", f"where it is asked for, by {toolchain.compiler(environ)}")
    fix = (
        "Install a version of torch that is, or a newer hf_cpu_accel."
        if toolchain.compiler(environ)
        else "Only compile= and torch.compile need one: `apt-get install g++`. The built kernels do without."
    )
    return Check("compiling", f"off, {off}; level 1 runs", "note", fix)


def bfloat16(fast: bool) -> Check:
    """Whether bfloat16 is faster than float32 in arithmetic; ``dtype="auto"`` follows it."""
    return Check("bfloat16", "native dot products, faster than float32" if fast else "no faster than float32")


def folder(path: Path) -> Check:
    """Whether the package's folder can be written, and by this user alone: the nearest folder that exists decides."""
    reason = private.problem(path.resolve())
    if reason is not None:
        return Check("folder", f"nothing is kept in {path}: {reason}", "problem", REMEDY)
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            return Check("folder", f"{path}, {shutil.disk_usage(existing).free / _GIB:.0f} GiB free")
    except OSError as error:  # permissions don't tell: root may write everywhere but on a read-only disk
        fix = f"Set {HOME_VARIABLE} to a folder on disk that you may write."
        return Check("folder", f"{path} can't be written: {error.strerror}", "problem", fix)


def imports(failures: Mapping[str, str]) -> Check:
    """Return whether the host packages that are installed can be imported, from `packages.import_failures`."""
    if not failures:
        return Check("imports", "every installed host package can be imported")
    listed = "; ".join(f"{file} fails to import ({error})" for file, error in failures.items())
    fix = (
        "Install versions that fit each other and this torch, or uninstall the package. Models that do not use it "
        "are accelerated as ever."
    )
    return Check("imports", listed, "note", fix)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
