"""CPU and memory limits of the control groups (containers, services) of this process.

Each group between the process and the root may have a limit, and the tightest one applies. Version 1 has one tree per controller
(files ``cpu.cfs_quota_us``, ``memory.limit_in_bytes``), version 2 one tree for all (``cpu.max``, ``memory.max``), and some hosts
mount both. Source: the kernel's ``Documentation/admin-guide/ cgroup-v1`` and ``cgroup-v2.rst``.

The argument of every function is the root folder of the files, ``/`` on a real machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from hf_cpu_accel.runtime.files import read_text

# Version 1 spells "no limit" as the largest page-aligned signed 64-bit number; pages are at most 64 KiB.
_UNLIMITED_V1 = 2**63 - 2**16


@dataclass(frozen=True)
class _Mount:
    """One mounted control-group tree: the group that it shows at its top, where it is, its v1 controllers."""

    top: PurePosixPath
    point: PurePosixPath
    version: int
    controllers: frozenset[str]


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the CPU quota of the groups in CPUs, e.g. 1.5; ``None`` without a limit."""
    quotas: list[float] = []
    for version, folder in _groups(root, "cpu"):
        if version == 2:
            fields = (read_text(folder / "cpu.max") or "max").split()
            runtime, period = fields[0], fields[1] if len(fields) > 1 else "100000"
        else:
            runtime = read_text(folder / "cpu.cfs_quota_us") or "-1"
            period = read_text(folder / "cpu.cfs_period_us") or "100000"
        if runtime.isdecimal() and period.isdecimal() and int(runtime) > 0 and int(period) > 0:
            quotas.append(int(runtime) / int(period))
    return min(quotas, default=None)


def memory_limit(root: Path = Path("/")) -> int | None:
    """Return the tightest memory limit of the groups in bytes; ``None`` if there is none."""
    return min((limit for _, _, limit in _limited_groups(root)), default=None)


def memory_headroom(root: Path = Path("/"), *, drops_used_files: bool = False) -> int | None:
    """Return the free memory of the tightest group in bytes; ``None`` without a limit.

    Pages of files that were read once (``inactive_file``) count as free, because the kernel drops them first. It also drops pages
    in use (``active_file``), at a cost; ``drops_used_files`` counts them as free too.
    """
    headrooms: list[int] = []
    for version, folder, limit in _limited_groups(root):
        usage = read_text(folder / ("memory.current" if version == 2 else "memory.usage_in_bytes"))
        if usage is None or not usage.isdecimal():
            continue
        prefix = "" if version == 2 else "total_"
        kinds = "(?:in)?active" if drops_used_files else "inactive"
        pages = re.findall(rf"^{prefix}{kinds}_file (\d+)$", read_text(folder / "memory.stat") or "", re.M)
        droppable = sum(map(int, pages))
        headrooms.append(max(0, limit - max(0, int(usage) - droppable)))
    return min(headrooms, default=None)


def _limited_groups(root: Path) -> Iterator[tuple[int, Path, int]]:
    for version, folder in _groups(root, "memory"):
        text = read_text(folder / ("memory.max" if version == 2 else "memory.limit_in_bytes"))
        if text is not None and text.isdecimal() and int(text) < _UNLIMITED_V1:
            yield version, folder, int(text)


def _groups(root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """Yield (version, folder) of each group from that of this process up to the mounted top."""
    memberships = list(_memberships(root))
    for mount in _mounts(root):
        if mount.version == 1 and controller not in mount.controllers:
            continue
        for version, controllers, path in memberships:
            if version != mount.version or (version == 1 and controller not in controllers):
                continue
            top = root / mount.point.relative_to("/")
            inside = _below(path, mount.top)
            for depth in range(len(inside), -1, -1):
                yield version, top.joinpath(*inside[:depth])


def _below(path: PurePosixPath, top: PurePosixPath) -> tuple[str, ...]:
    """Return the names from ``top`` down to ``path``.

    A container without its own cgroup namespace reads the host's path while its mount starts at its own group, and a path outside
    of the namespace starts with ``..``. In both cases only the mounted top is visible.
    """
    if ".." in path.parts or not path.is_relative_to(top):
        return ()
    return path.relative_to(top).parts


def _memberships(root: Path) -> Iterator[tuple[int, frozenset[str], PurePosixPath]]:
    """Parse ``/proc/self/cgroup``: lines ``id:controllers:path``; version 2 has id 0, no controllers."""
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if path.startswith("/"):
            version = 2 if number == "0" and not controllers else 1
            yield version, frozenset(controllers.split(",")), PurePosixPath(path)


def _mounts(root: Path) -> Iterator[_Mount]:
    """Parse ``/proc/self/mountinfo`` (see proc(5)) for the mounted control-group trees."""
    for line in (read_text(root / "proc/self/mountinfo") or "").splitlines():
        before, separator, after = line.partition(" - ")
        fields, rest = before.split(), after.split()
        if not separator or len(fields) < 5 or len(rest) < 3 or rest[0] not in ("cgroup", "cgroup2"):
            continue
        top, point = (PurePosixPath(_unescape(field)) for field in fields[3:5])
        if point.is_absolute():
            yield _Mount(top, point, 2 if rest[0] == "cgroup2" else 1, frozenset(rest[2].split(",")))


def _unescape(field: str) -> str:
    """Decode the octal escapes of blanks and backslashes in mount tables."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), field)
