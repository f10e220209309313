"""Cores are dealt out whole, by memory node, and within affinity and quota."""

import pytest

from hf_cpu_accel.serve.instances import placement
from hf_cpu_accel.serve.instances.placement import Limits, place

# Two nodes of four cores with two logical CPUs each: 0-7 are the cores' first, 8-15 their second ones.
TWO_NODES = {
    "sys/devices/system/node/node0/cpulist": "0-3,8-11",
    "sys/devices/system/node/node1/cpulist": "4-7,12-15",
} | {
    f"sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list": f"{cpu % 8},{cpu % 8 + 8}"
    for cpu in range(16)
}
ALL = frozenset(range(16))


def test_instances_get_whole_cores_of_one_node_each(plant):
    found = place(Limits(ALL, None), 2, root=plant(TWO_NODES))
    assert [each.cpus for each in found.places] == [{0, 1, 2, 3, 8, 9, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15}]
    assert [(each.threads, each.node) for each in found.places] == [(4, 0), (4, 1)]
    assert found.active == 2
    assert "physical cores" in found.reason


def test_three_threads_do_not_cross_nodes_while_one_has_room(plant):
    found = place(Limits(ALL, None), 2, 3, root=plant(TWO_NODES))
    assert [each.node for each in found.places] == [0, 1]
    across = place(Limits(ALL, None), 1, 6, root=plant(TWO_NODES))
    assert across.places[0].node is None
    assert len(across.places[0].cpus) == 12
    assert "several NUMA nodes" in across.reason


def test_affinity_is_respected(plant):
    found = place(Limits(frozenset({2, 5, 13}), None), root=plant(TWO_NODES))
    assert sorted(map(sorted, (each.cpus for each in found.places))) == [[2], [5, 13]]
    assert [each.threads for each in found.places] == [1, 1]


@pytest.mark.parametrize(
    ("quota", "asked", "instances", "threads", "active"),
    [
        (None, (None, None), 2, 4, 2),
        (1.0, (None, None), 1, 1, 1),
        (1.5, (None, None), 2, 1, 2),
        (2.0, (4, None), 4, 1, 2),
        (1.0, (2, None), 2, 1, 1),
        (0.5, (2, 1), 2, 1, 1),
        (4.0, (None, 2), 2, 2, 2),
        (4.0, (2, None), 2, 2, 2),
        (2.0, (1, 4), 1, 4, 1),
    ],
)
def test_quotas_limit_the_active_instances(plant, quota, asked, instances, threads, active):
    found = place(Limits(ALL, quota), *asked, root=plant(TWO_NODES))
    assert len(found.places) == instances
    assert {each.threads for each in found.places} == {threads}
    assert found.active == active
    assert ("at the same time" in found.reason) == (active < instances)
    # Every container of a machine would choose the same cores.
    assert all((each.cpus == ALL) == (quota is not None and quota < 8) for each in found.places)
    assert ("on any core" in found.reason) == (quota is not None)


def test_more_instances_than_cores_share_them(plant):
    found = place(Limits(frozenset({0, 1}), None), 3, root=plant(TWO_NODES))
    assert [set(each.cpus) for each in found.places] == [{0}, {1}, {0}]
    assert found.active == 2


def test_limits_are_read_again(plant):
    files = {
        "proc/self/cgroup": "0::/box",
        "proc/self/mountinfo": "25 30 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw",
        "sys/fs/cgroup/box/cpu.max": "100000 100000",
    }
    root = plant(files)
    assert placement.limits(root).quota == 1
    plant({"sys/fs/cgroup/box/cpu.max": "max 100000"})
    assert placement.limits(root).quota is None


@pytest.mark.parametrize("value", [0, -1])
def test_numbers_below_one_are_rejected(value):
    with pytest.raises(ValueError, match=f"instances={value}"):
        place(Limits(ALL, None), value)


@pytest.mark.parametrize("value", [1.5, "2", True])
def test_values_that_are_not_numbers_are_rejected(value):
    with pytest.raises(TypeError, match="threads="):
        place(Limits(ALL, None), 1, value)
