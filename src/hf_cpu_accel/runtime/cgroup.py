"""CPU and memory limits of the control groups (containers, services) that hold this process.

A process sits in a tree of groups and every group on the way to the root may carry a limit; the tightest one
binds. Version 1 has one tree per controller (files ``cpu.cfs_quota_us``, ``memory.limit_in_bytes``), version
2 one for all (``cpu.max``, ``memory.max``), and hosts in between mount both. Source: the kernel's
``Documentation/admin-guide/ cgroup-v1`` and ``cgroup-v2.rst``.

Every function takes the root folder of the tree that it reads, ``/`` on a real machine.
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
    """CPUs' worth of time that the groups grant, e.g. 1.5; ``None`` if no group on the way limits it."""
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
    """The tightest memory limit of the groups, in bytes; ``None`` if there is none."""
    return min((limit for _, _, limit in _limited_groups(root)), default=None)


def memory_headroom(root: Path = Path("/"), *, drops_used_files: bool = False) -> int | None:
    """Bytes that the tightest group still has to give; ``None`` if no group is limited.

    Pages of files that were read once (``inactive_file``) count as free: the kernel drops them before it
    refuses. So it does with those that are in use (``active_file``), which has a price;
    ``drops_used_files`` counts them, too.
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
    """(version, folder) of each group on the way from this process's own up to the top that is mounted."""
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
    """The names from ``top`` down to ``path``.

    A container without its own cgroup namespace reads its path as the host sees it while the mount already
    starts at its own group, and a path outside of the namespace starts with ``..``: then the mounted top is
    all there is to see.
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
    """Mount tables write blanks and backslashes as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), field)
