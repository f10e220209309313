"""Processors, cores, caches and memory nodes from ``/proc`` and ``/sys`` of Linux.

The argument of every function is the root folder of the files, ``/`` on a real machine. The result is empty or ``None`` where the
kernel, a sandbox or another system does not have them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hf_cpu_accel.runtime.files import read_text

_ARM_VENDORS = {
    0x41: "ARM", 0x46: "Fujitsu", 0x48: "HiSilicon", 0x4E: "NVIDIA", 0x61: "Apple", 0x6D: "Microsoft",
    0xC0: "Ampere",
}  # fmt: skip
_ARM_CORES = {
    (0x41, 0xD0C): "Neoverse-N1", (0x41, 0xD40): "Neoverse-V1", (0x41, 0xD49): "Neoverse-N2",
    (0x41, 0xD4F): "Neoverse-V2",
}  # fmt: skip


@dataclass(frozen=True)
class Processor:
    """The content of ``/proc/cpuinfo``: names, and the instruction-set flags that all processors share."""

    model_name: str
    vendor: str
    flags: frozenset[str]


@dataclass(frozen=True)
class Caches:
    """The sizes of caches in bytes, ``None`` if unknown: L1 data and L2 as one core's share, L3 as a full instance."""

    l1d: int | None
    l2: int | None
    l3: int | None


def parse_cpu_list(text: str) -> frozenset[int]:
    """Parse the kernel's list format, ``"0-3,8"`` -> {0, 1, 2, 3, 8}.

    Raises:
        ValueError: the text has another format.
    """
    numbers: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise ValueError(f"cpu list: {part!r} in {text!r} is neither a number nor a range such as '0-3'")
        first = int(match.group(1))
        numbers.update(range(first, int(match.group(2) or first) + 1))
    return frozenset(numbers)


def format_cpu_list(numbers: Iterable[int]) -> str:
    """Format numbers in the kernel's list format, {0, 1, 2, 3, 8} -> ``"0-3,8"``."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def processor(root: Path = Path("/")) -> Processor | None:
    """Parse ``/proc/cpuinfo``; ``None`` if there is none.

    The flags are those that all processors share: on machines with mixed cores a thread may land on any of
    them. The kernel shows a vector flag only if it also saves that state, so a flag here is safe to use.
    """
    records = _records(root)
    flag_lists = [set(names.split()) for r in records if (names := r.get("flags", r.get("features")))]
    if not records:
        return None
    flags = frozenset(set.intersection(*flag_lists)) if flag_lists else frozenset()
    first = records[0]
    if "cpu implementer" in first:
        maker, part = int(first["cpu implementer"], 0), int(first.get("cpu part", "0"), 0)
        vendor = _ARM_VENDORS.get(maker, f"implementer {maker:#x}")
        return Processor(f"{vendor} {_ARM_CORES.get((maker, part), f'part {part:#x}')}", vendor, flags)
    return Processor(first.get("model name", "unknown"), first.get("vendor_id", "unknown"), flags)


def online_cpus(root: Path = Path("/")) -> frozenset[int]:
    """Return the logical CPUs that are online."""
    text = read_text(root / "sys/devices/system/cpu/online")
    if text:
        return parse_cpu_list(text)
    return frozenset(int(record["processor"]) for record in _records(root) if _is_numbered(record))


def cores(cpus: Iterable[int], root: Path = Path("/")) -> frozenset[frozenset[int]]:
    """Group ``cpus`` by physical core: hardware threads (SMT siblings) of one core share a set.

    A CPU without information counts as a separate core.
    """
    wanted = frozenset(cpus)
    by_record = _cores_of_cpuinfo(root)
    groups: dict[object, set[int]] = {}
    for cpu in wanted:
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        text = read_text(folder / "core_cpus_list") or read_text(folder / "thread_siblings_list")
        key: object = parse_cpu_list(text) if text else by_record.get(cpu, cpu)
        groups.setdefault(key, set()).add(cpu)
    return frozenset(frozenset(group) for group in groups.values())


def caches(cpu: int, root: Path = Path("/")) -> Caches:
    """Return the caches of ``cpu``. A level that several cores share is divided among them, except L3."""
    found: dict[int, int] = {}
    for folder in sorted((root / f"sys/devices/system/cpu/cpu{cpu}/cache").glob("index*")):
        level, kind, size = (read_text(folder / name) or "" for name in ("level", "type", "size"))
        match = re.fullmatch(r"(\d+)([KMG]?)", size)
        if not level.isdecimal() or match is None or kind not in ("Data", "Unified"):
            continue
        shared = parse_cpu_list(read_text(folder / "shared_cpu_list") or "") or {cpu}
        sharers = 1 if int(level) >= 3 else len(cores(shared, root))
        found[int(level)] = int(match.group(1)) * 1024 ** ("", "K", "M", "G").index(match.group(2)) // sharers
    return Caches(found.get(1), found.get(2), found.get(3))


def numa_nodes(root: Path = Path("/")) -> dict[int, frozenset[int]]:
    """Return the CPUs of each memory node that has CPUs; empty if the system has no information."""
    nodes: dict[int, frozenset[int]] = {}
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        cpus = parse_cpu_list(read_text(folder / "cpulist") or "")
        if cpus:
            nodes[int(folder.name.removeprefix("node"))] = cpus
    return dict(sorted(nodes.items()))


def _cores_of_cpuinfo(root: Path) -> dict[int, tuple[str, str]]:
    """Return {CPU: (socket, core)} from ``/proc/cpuinfo``, for sandboxes that hide ``/sys``."""
    found: dict[int, tuple[str, str]] = {}
    for record in _records(root):
        if _is_numbered(record) and "core id" in record:
            found[int(record["processor"])] = (record.get("physical id", "0"), record["core id"])
    return found


def _is_numbered(record: dict[str, str]) -> bool:
    """Return whether the record has a number: old Arm kernels have the CPU's name under ``Processor`` besides."""
    return record.get("processor", "").isdecimal()


def _records(root: Path) -> list[dict[str, str]]:
    """Return the records of ``/proc/cpuinfo``, one per processor, of ``key : value`` lines with keys in lower case."""
    records: list[dict[str, str]] = []
    for text in (read_text(root / "proc/cpuinfo") or "").split("\n\n"):
        pairs = (line.partition(":") for line in text.splitlines() if ":" in line)
        records.append({key.strip().lower(): value.strip() for key, _, value in pairs})
    return [record for record in records if record]
