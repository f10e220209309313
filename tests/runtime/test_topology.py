"""Processors, cores, caches and nodes: with and without SMT, x86 and Arm, and behind sandboxes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_cpu_accel.runtime import topology
from hf_cpu_accel.runtime.topology import Caches

Plant = Callable[[Mapping[str, str]], Path]
CPU = "sys/devices/system/cpu"


@pytest.mark.parametrize(
    ("text", "expected"), [("", set()), ("0", {0}), ("0-3", {0, 1, 2, 3}), ("0-1,8,10-11", {0, 1, 8, 10, 11})]
)
def test_cpu_list(text: str, expected: set[int]) -> None:
    assert topology.parse_cpu_list(text) == expected


@given(st.frozensets(st.integers(0, 512)))
def test_cpu_list_round_trip(numbers: frozenset[int]) -> None:
    assert topology.parse_cpu_list(topology.format_cpu_list(numbers)) == numbers


@pytest.mark.parametrize("text", ["a", "1-", "-1", "1;2"])
def test_bad_cpu_list(text: str) -> None:
    with pytest.raises(ValueError, match="neither a number nor a range"):
        topology.parse_cpu_list(text)


def test_flags_are_those_of_all_processors(plant: Plant) -> None:
    record = "processor\t: {}\nvendor_id\t: AuthenticAMD\nmodel name\t: EPYC: the 4th\nflags\t\t: {}"
    root = plant(
        {"proc/cpuinfo": record.format(0, "sse avx2 fma") + "\n\n" + record.format(1, "sse avx2") + "\n"}
    )
    assert topology.processor(root) == topology.Processor(
        "EPYC: the 4th", "AuthenticAMD", frozenset({"sse", "avx2"})
    )


def test_arm_processor(plant: Plant) -> None:
    text = "processor\t: 0\nFeatures\t: fp asimd bf16 i8mm\nCPU implementer\t: 0x41\nCPU part\t: 0xd40"
    found = topology.processor(plant({"proc/cpuinfo": text}))
    assert found == topology.Processor("ARM Neoverse-V1", "ARM", frozenset({"fp", "asimd", "bf16", "i8mm"}))


def test_arm_nameplate_is_no_processor_number(plant: Plant) -> None:
    root = plant({"proc/cpuinfo": "Processor : AArch64 rev 4\nprocessor : 0\n\nProcessor : AArch64 rev 4"})
    assert topology.online_cpus(root) == {0}


def test_unknown_arm_part(plant: Plant) -> None:
    found = topology.processor(
        plant({"proc/cpuinfo": "Features : asimd\nCPU implementer : 0xaa\nCPU part : 0x1"})
    )
    assert found is not None
    assert found.model_name == "implementer 0xaa part 0x1"


def test_no_cpuinfo(tmp_path: Path) -> None:
    assert topology.processor(tmp_path) is None
    assert topology.online_cpus(tmp_path) == frozenset()


@pytest.mark.parametrize("name", ["core_cpus_list", "thread_siblings_list"])
def test_smt_siblings_share_a_core(plant: Plant, name: str) -> None:
    siblings = {0: "0,4", 1: "1,5", 4: "0,4", 5: "1,5"}
    root = plant({f"{CPU}/cpu{cpu}/topology/{name}": text for cpu, text in siblings.items()})
    assert topology.cores({0, 1, 4, 5}, root) == {frozenset({0, 4}), frozenset({1, 5})}
    assert topology.cores({0, 1}, root) == {frozenset({0}), frozenset({1})}
    assert topology.cores({0, 4}, root) == {frozenset({0, 4})}


def test_cores_from_cpuinfo_where_sys_is_hidden(plant: Plant) -> None:
    record = "processor : {}\nphysical id : {}\ncore id : {}"
    ids = [(0, 0, 0), (1, 0, 0), (2, 1, 0), (3, 1, 0)]
    root = plant({"proc/cpuinfo": "\n\n".join(record.format(*numbers) for numbers in ids)})
    assert topology.online_cpus(root) == {0, 1, 2, 3}
    assert topology.cores({0, 1, 2, 3}, root) == {frozenset({0, 1}), frozenset({2, 3})}


def test_unknown_topology_counts_every_cpu(tmp_path: Path) -> None:
    assert len(topology.cores({0, 1, 2}, tmp_path)) == 3


def cache(cpu: int, index: int, level: int, kind: str, size: str, shared: str) -> dict[str, str]:
    base = f"{CPU}/cpu{cpu}/cache/index{index}"
    return {
        f"{base}/level": str(level),
        f"{base}/type": kind,
        f"{base}/size": size,
        f"{base}/shared_cpu_list": shared,
    }


def test_caches(plant: Plant) -> None:
    files = {f"{CPU}/cpu{cpu}/topology/core_cpus_list": "0-1" if cpu < 2 else "2-3" for cpu in range(4)}
    files |= cache(0, 0, 1, "Data", "32K", "0-1")
    files |= cache(0, 1, 1, "Instruction", "64K", "0-1")
    files |= cache(0, 2, 2, "Unified", "4M", "0-3")  # one L2 for two cores
    files |= cache(0, 3, 3, "Unified", "256M", "0-3")
    assert topology.caches(0, plant(files)) == Caches(32 << 10, 2 << 20, 256 << 20)


def test_hidden_caches(tmp_path: Path) -> None:
    assert topology.caches(0, tmp_path) == Caches(None, None, None)


def test_nodes_of_memory_alone_do_not_count(plant: Plant) -> None:
    node = "sys/devices/system/node"
    root = plant(
        {f"{node}/node0/cpulist": "0-3", f"{node}/node10/cpulist": "4-7", f"{node}/node2/cpulist": ""}
    )
    assert topology.numa_nodes(root) == {0: frozenset(range(4)), 10: frozenset(range(4, 8))}
