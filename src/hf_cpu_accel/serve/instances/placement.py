"""Which cores each instance gets: whole ones, of one memory node where they fit, and no more at a time than the limits grant."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from hf_cpu_accel.runtime import cgroup, topology
from hf_cpu_accel.runtime.hardware import thread_limit

# As torch.backends.xeon.run_cpu has it: more than four cores of one instance are rarely worth it for the sizes of requests.
_CORES_OF_AN_INSTANCE = 4


@dataclass(frozen=True)
class Limits:
    """What this process may use at the moment: logical CPUs, and CPUs' worth of time (None: all of it)."""

    cpus: frozenset[int]
    quota: float | None


@dataclass(frozen=True)
class Place:
    """What one instance has: the logical CPUs it is pinned to, its threads, and the memory node (None: several, or not shown)."""

    cpus: frozenset[int]
    threads: int
    node: int | None = None

    def __str__(self) -> str:
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        node = "" if self.node is None else f", node {self.node}"
        return f"CPUs {topology.format_cpu_list(self.cpus)}{node}, {threads}"


@dataclass(frozen=True)
class Placement:
    """A place for each instance, how many of them compute at a time, and a sentence that says why."""

    places: tuple[Place, ...]
    active: int
    reason: str


def threads_of_an_instance(usable: int) -> int:
    """How many threads an instance has by default, of so many cores: one of up to four, and four of more."""
    return 1 if usable <= _CORES_OF_AN_INSTANCE else _CORES_OF_AN_INSTANCE


def limits(root: Path = Path("/")) -> Limits:
    """Read anew at each call: affinity (`taskset`, cpusets) of the main thread, and the quota of the control groups."""
    return Limits(frozenset(os.sched_getaffinity(os.getpid())), cgroup.cpu_quota(root))


def place(
    granted: Limits, instances: int | None = None, threads: int | None = None, root: Path = Path("/")
) -> Placement:
    """Deal out cores.

    Args:
        granted: see `limits`.
        instances: None for as many as there are cores for, of one thread on up to four cores and of four threads on more.
        threads: of each instance; None for an equal share.
        root: where the machine's `/sys` and `/proc` are.

    Raises:
        TypeError, ValueError: a number that is none, or below 1.
    """
    for name, value in (("instances", instances), ("threads", threads)):
        _check_count(name, value)
    cores = topology.cores(granted.cpus, root)
    usable, why = thread_limit(len(granted.cpus), len(cores), granted.quota)
    if instances is None and threads is None:
        threads = threads_of_an_instance(usable)
    threads = threads or max(1, usable // (instances or 1))
    instances = instances or max(1, usable // threads)
    active = max(1, min(instances, usable // threads))
    nodes = _cores_by_node(cores, root)
    # By a quota, which says how much but not which: other containers would choose the same cores.
    shared = usable < len(cores)
    if shared:
        node = next(iter(nodes)) if len(nodes) == 1 else None
        places = (Place(granted.cpus, threads, node),) * instances
    else:
        places = tuple(_deal(nodes, instances, threads))
    reason = f"{instances} x {threads} thread{'s' if threads > 1 else ''}: {why}"
    if active < instances:
        reason += f"; {active} of {instances} instances compute at a time"
    if shared:
        reason += "; on any core, since a quota does not say which are free"
    elif len(nodes) > 1 and any(each.node is None for each in places):
        reason += "; an instance has cores of several memory nodes"
    return Placement(places, active, reason)


def _check_count(name: str, value: int | None) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise TypeError(f"{name}={value!r}: accepted are whole numbers from 1, or None")
    if value is not None and value < 1:
        raise ValueError(f"{name}={value}: accepted are whole numbers from 1, or None")


def _cores_by_node(cores: frozenset[frozenset[int]], root: Path) -> dict[int | None, list[frozenset[int]]]:
    nodes = topology.numa_nodes(root)
    found: dict[int | None, list[frozenset[int]]] = {}
    for core in sorted(cores, key=min):
        node = next((number for number, cpus in nodes.items() if core & cpus), None)
        found.setdefault(node, []).append(core)
    return found


def _deal(nodes: dict[int | None, list[frozenset[int]]], instances: int, threads: int) -> list[Place]:
    """Each instance on the node with most cores left, or across nodes where none has enough; all anew when all are dealt out."""
    left = {node: list(cores) for node, cores in nodes.items()}
    places = []
    for _ in range(instances):
        if not any(left.values()):
            left = {node: list(cores) for node, cores in nodes.items()}
        roomy = max(left, key=lambda node: len(left[node]))
        if len(left[roomy]) >= threads:
            mine, node = [left[roomy].pop(0) for _ in range(threads)], roomy
        else:
            every = [(node, core) for node, cores in left.items() for core in cores][:threads]
            for owner, core in every:
                left[owner].remove(core)
            mine, owners = [core for _, core in every], {owner for owner, _ in every}
            node = owners.pop() if len(owners) == 1 else None
        places.append(Place(frozenset().union(*mine), threads, node))
    return places
