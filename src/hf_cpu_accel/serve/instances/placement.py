"""Assign cores to instances: whole cores, of one NUMA node if possible, within the limits of the process."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from hf_cpu_accel.runtime import cgroup, topology
from hf_cpu_accel.runtime.hardware import thread_limit

# As in torch.backends.xeon.run_cpu: for requests, more than four cores per instance rarely pay.
_CORES_OF_AN_INSTANCE = 4


@dataclass(frozen=True)
class Limits:
    """The current limits of this process: its logical CPUs, and its CPU quota (None without a quota)."""

    cpus: frozenset[int]
    quota: float | None


@dataclass(frozen=True)
class Place:
    """The logical CPUs of an instance, its number of threads, and its NUMA node (None for several or unknown nodes)."""

    cpus: frozenset[int]
    threads: int
    node: int | None = None

    def __str__(self) -> str:
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        node = "" if self.node is None else f", node {self.node}"
        return f"CPUs {topology.format_cpu_list(self.cpus)}{node}, {threads}"


@dataclass(frozen=True)
class Placement:
    """The place of each instance, the number of instances that compute at the same time, and the reason as a sentence."""

    places: tuple[Place, ...]
    active: int
    reason: str


def threads_of_an_instance(usable: int) -> int:
    """Return the default number of threads per instance: one on up to four usable cores, or else four."""
    return 1 if usable <= _CORES_OF_AN_INSTANCE else _CORES_OF_AN_INSTANCE


def limits(root: Path = Path("/")) -> Limits:
    """Read the current affinity of the main thread (`taskset`, cpusets) and the cgroup CPU quota."""
    return Limits(frozenset(os.sched_getaffinity(os.getpid())), cgroup.cpu_quota(root))


def place(
    granted: Limits, instances: int | None = None, threads: int | None = None, root: Path = Path("/")
) -> Placement:
    """Assign cores to instances.

    Args:
        granted: the limits of this process.
        instances: number of instances; None for as many as there are cores for, see `threads_of_an_instance`.
        threads: number of threads per instance; None for an equal share.
        root: folder that contains `/sys` and `/proc`.

    Raises:
        TypeError: a value that is not a whole number.
        ValueError: a number below 1.
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
    # A quota limits the time, but names no cores. Pinning is wrong then, because other containers would choose the same cores.
    shared = usable < len(cores)
    if shared:
        node = next(iter(nodes)) if len(nodes) == 1 else None
        places = (Place(granted.cpus, threads, node),) * instances
    else:
        places = tuple(_deal(nodes, instances, threads))
    reason = f"{instances} x {threads} thread{'s' if threads > 1 else ''}: {why}"
    if active < instances:
        reason += f"; {active} of {instances} instances compute at the same time"
    if shared:
        reason += "; on any core, because a quota names no cores"
    elif len(nodes) > 1 and any(each.node is None for each in places):
        reason += "; an instance has cores of several NUMA nodes"
    return Placement(places, active, reason)


def _check_count(name: str, value: int | None) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise TypeError(f"{name}={value!r}: expected a whole number from 1, or None")
    if value is not None and value < 1:
        raise ValueError(f"{name}={value}: expected a whole number from 1, or None")


def _cores_by_node(cores: frozenset[frozenset[int]], root: Path) -> dict[int | None, list[frozenset[int]]]:
    nodes = topology.numa_nodes(root)
    by_node: dict[int | None, list[frozenset[int]]] = {}
    for core in sorted(cores, key=min):
        node = next((number for number, cpus in nodes.items() if core & cpus), None)
        by_node.setdefault(node, []).append(core)
    return by_node


def _deal(nodes: dict[int | None, list[frozenset[int]]], instances: int, threads: int) -> list[Place]:
    """Put each instance on the node with most free cores, or across nodes if no node has enough; reuse cores if none is free."""
    free = {node: list(cores) for node, cores in nodes.items()}
    places = []
    for _ in range(instances):
        if not any(free.values()):
            free = {node: list(cores) for node, cores in nodes.items()}
        largest = max(free, key=lambda node: len(free[node]))
        if len(free[largest]) >= threads:
            chosen, node = [free[largest].pop(0) for _ in range(threads)], largest
        else:
            pairs = [(node, core) for node, cores in free.items() for core in cores][:threads]
            for owner, core in pairs:
                free[owner].remove(core)
            chosen, owners = [core for _, core in pairs], {owner for owner, _ in pairs}
            node = owners.pop() if len(owners) == 1 else None
        places.append(Place(frozenset().union(*chosen), threads, node))
    return places
