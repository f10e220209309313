"""Limits of nested control groups, versions 1 and 2, as containers show them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_cpu_accel.runtime import cgroup

Plant = Callable[[Mapping[str, str]], Path]

V2_MOUNT = "31 23 0:29 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"
V1_CPU_MOUNT = "32 31 0:30 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct"
V1_MEMORY_MOUNT = "33 31 0:31 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"


def v2(path: str, **files: str) -> dict[str, str]:
    """A version 2 machine: ``folder__below__the__mount="cpu.max"``, the mount itself with an empty name."""
    tree = {f"sys/fs/cgroup/{folder.replace('__', '/')}/cpu.max": text for folder, text in files.items()}
    return {"proc/self/cgroup": f"0::{path}", "proc/self/mountinfo": V2_MOUNT, **tree}


def v1(path: str, **quotas: str) -> dict[str, str]:
    """A version 1 machine with the period 100 ms."""
    files = {"proc/self/cgroup": f"4:cpu,cpuacct:{path}\n3:memory:{path}\n0::/"}
    files["proc/self/mountinfo"] = "\n".join((V1_CPU_MOUNT, V1_MEMORY_MOUNT))
    for folder, quota in quotas.items():
        base = f"sys/fs/cgroup/cpu,cpuacct/{folder.replace('__', '/')}"
        files |= {f"{base}/cpu.cfs_quota_us": quota, f"{base}/cpu.cfs_period_us": "100000"}
    return files


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({}, None, id="no-proc"),
        pytest.param(v2("/"), None, id="v2-top-without-limit-file"),
        pytest.param(v2("/", **{"": "150000 100000"}), 1.5, id="v2-container-with-own-namespace"),
        pytest.param(v2("/a", a="max 100000"), None, id="v2-unlimited"),
        pytest.param(v2("/a", a="400000"), 4.0, id="v2-default-period"),
        pytest.param(
            v2("/a/b/c", a="200000 100000", a__b="max 100000", a__b__c="800000 100000"), 2.0, id="v2-parent"
        ),
        pytest.param(v2("/a/b", a="800000 100000", a__b="50000 100000"), 0.5, id="v2-child"),
        pytest.param(v2("/a", b="100000 100000"), None, id="v2-neighbor-does-not-count"),
        pytest.param(v2("/../../x", **{"": "300000 100000"}), 3.0, id="v2-path-outside-of-namespace"),
        pytest.param(v1("/", **{"": "-1"}), None, id="v1-unlimited"),
        pytest.param(v1("/docker/x", docker__x="250000"), 2.5, id="v1"),
        pytest.param(v1("/pod/x", pod="100000", pod__x="-1"), 1.0, id="v1-parent"),
    ],
)
def test_cpu_quota_is_the_tightest_on_the_way(
    plant: Plant, files: dict[str, str], expected: float | None
) -> None:
    assert cgroup.cpu_quota(plant(files)) == expected


def test_mount_that_starts_at_the_own_group(plant: Plant) -> None:
    """Docker on version 1: the path is the host's, the mount shows the container's group at its top."""
    files = {
        "proc/self/cgroup": "4:cpu,cpuacct:/docker/x",
        "proc/self/mountinfo": V1_CPU_MOUNT.replace(" / ", " /docker/x ", 1),
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "150000",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "50000",
    }
    assert cgroup.cpu_quota(plant(files)) == 3.0


def test_hybrid_host_takes_the_tighter_version(plant: Plant) -> None:
    files = v1("/a", a="300000")
    files["proc/self/mountinfo"] += "\n41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
    files["proc/self/cgroup"] = "4:cpu,cpuacct:/a\n0::/a"
    files["sys/fs/cgroup/unified/a/cpu.max"] = "200000 100000"
    assert cgroup.cpu_quota(plant(files)) == 2.0


def test_blank_in_the_mount_point(plant: Plant) -> None:
    files = {
        "proc/self/cgroup": "0::/",
        "proc/self/mountinfo": V2_MOUNT.replace("/sys/fs/cgroup", r"/my\040groups"),
        "my groups/cpu.max": "100000 100000",
    }
    assert cgroup.cpu_quota(plant(files)) == 1.0


def test_memory_limit_and_headroom_v2(plant: Plant) -> None:
    files = {
        "proc/self/cgroup": "0::/a/b",
        "proc/self/mountinfo": V2_MOUNT,
        "sys/fs/cgroup/a/memory.max": "1000",
        "sys/fs/cgroup/a/memory.current": "900",
        "sys/fs/cgroup/a/memory.stat": "anon 500\ninactive_file 300\nactive_file 100",
        "sys/fs/cgroup/a/b/memory.max": "max",
        "sys/fs/cgroup/a/b/memory.current": "800",
    }
    root = plant(files)
    assert cgroup.memory_limit(root) == 1000
    assert cgroup.memory_headroom(root) == 400
    assert cgroup.memory_headroom(root, drops_used_files=True) == 500


def test_memory_limit_and_headroom_v1(plant: Plant) -> None:
    folder = "sys/fs/cgroup/memory"
    files = v1("/x") | {
        f"{folder}/memory.limit_in_bytes": "9223372036854771712",  # the kernel's "no limit"
        f"{folder}/memory.usage_in_bytes": "5000",
        f"{folder}/x/memory.limit_in_bytes": "4096",
        f"{folder}/x/memory.usage_in_bytes": "4000",
        f"{folder}/x/memory.stat": "inactive_file 1\ntotal_inactive_file 1000\ntotal_active_file 1",
    }
    root = plant(files)
    assert cgroup.memory_limit(root) == 4096
    assert cgroup.memory_headroom(root) == 1096
    assert cgroup.memory_headroom(root, drops_used_files=True) == 1097


def test_no_memory_limit(plant: Plant) -> None:
    root = plant(v1("/") | {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854710272"})
    assert cgroup.memory_limit(root) is None
    assert cgroup.memory_headroom(root) is None


@given(
    limits=st.lists(st.none() | st.integers(1000, 10**8), min_size=1, max_size=5),
    period=st.integers(1000, 10**6),
)
def test_any_nesting(tmp_path_factory: pytest.TempPathFactory, limits: list[int | None], period: int) -> None:
    root = tmp_path_factory.mktemp("machine")
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/mountinfo").write_text(V2_MOUNT)
    (root / "proc/self/cgroup").write_text("0::" + "/g" * len(limits))
    folder = root / "sys/fs/cgroup"
    for limit in limits:
        folder = folder / "g"
        folder.mkdir(parents=True)
        (folder / "cpu.max").write_text(f"{'max' if limit is None else limit} {period}")
    expected = min((limit / period for limit in limits if limit is not None), default=None)
    assert cgroup.cpu_quota(root) == expected
