"""`hf-cpu-accel launch`: what is set, for whom, and what becomes of signals and statuses."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from hf_cpu_accel.cli.main import app
from hf_cpu_accel.serve.instances import environment, launch, placement
from hf_cpu_accel.serve.instances.placement import Limits
from tests.children import run_child

TELL = """
import json, os, sys
with open(sys.argv[1] + os.environ["HF_CPU_ACCEL_INSTANCE"], "w") as file:
    json.dump([sorted(os.sched_getaffinity(0)), os.environ["OMP_NUM_THREADS"], sys.argv[2:]], file)
sys.exit(3 * int(os.environ["HF_CPU_ACCEL_INSTANCE"]))
"""
LAUNCH = [sys.executable, "-c", "from hf_cpu_accel.cli.main import app; app()", "launch"]


def found(*names):
    return lambda name: f"lib{name}.so.1" if name in names else None


def test_each_instance_has_its_cores_and_its_arguments(tmp_path):
    script = tmp_path / "tell.py"
    script.write_text(TELL)
    cpus = sorted(os.sched_getaffinity(0))[:2]
    told = str(tmp_path / "told")
    command = [*LAUNCH, "--instances", str(len(cpus)), "--threads", "1", str(script), told, "--threads", "9"]
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = run_child(command, env=environ)
    answers = [json.loads((tmp_path / f"told{number}").read_text()) for number in range(len(cpus))]
    assert answers == [[[cpu], "1", ["--threads", "9"]] for cpu in cpus]
    assert done.returncode == (3 if len(cpus) > 1 else 0)
    assert all(name in done.stderr for name in ("OMP_NUM_THREADS", "instance 0", "THP_MEM_ALLOC_ENABLE"))
    assert done.stdout == ""


def test_a_signal_reaches_the_instances(tmp_path):
    script, ready = tmp_path / "wait.py", tmp_path / "ready"
    script.write_text(
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        "pathlib.Path(sys.argv[1]).touch()\ntime.sleep(60)"
    )
    process = subprocess.Popen([*LAUNCH, str(script), str(ready)], stderr=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while not ready.exists() and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 7


def test_signals_give_the_exit_status_of_shells():
    plan = launch.plan(["-c", "import os; os.kill(os.getpid(), 9)"])
    assert launch.run(plan) == 137


def test_cores_are_divided_within_the_quota(monkeypatch):
    monkeypatch.setattr(placement, "limits", lambda: Limits(frozenset({0, 1}), 1.0))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    plan = launch.plan(["script.py"])
    assert plan.environments[0]["OMP_NUM_THREADS"] == "1"
    assert "grants 1 CPUs" in plan.settings[0].why
    assert plan.command == (sys.executable, "script.py")


@pytest.mark.parametrize(
    ("asked", "installed", "expected"),
    [
        ("auto", ("jemalloc", "tcmalloc_minimal"), {"LD_PRELOAD": "libjemalloc.so.1"}),
        ("auto", ("tcmalloc",), {"LD_PRELOAD": "libtcmalloc.so.1"}),
        ("tcmalloc", ("jemalloc", "tcmalloc_minimal"), {"LD_PRELOAD": "libtcmalloc_minimal.so.1"}),
        ("auto", (), {"MALLOC_ARENA_MAX": "2"}),
        ("default", ("jemalloc",), {"MALLOC_ARENA_MAX": "2"}),
    ],
)
def test_installed_allocators_are_preloaded(asked, installed, expected):
    given, rows = environment.variables(2, {}, asked, find=found(*installed))
    assert {name: given.get(name) for name in ("LD_PRELOAD", "MALLOC_ARENA_MAX") if name in given} == expected
    assert ("MALLOC_CONF" in given) == ("jemalloc" in given.get("LD_PRELOAD", ""))
    assert given["OMP_NUM_THREADS"] == "2"
    assert {row.name for row in rows} == set(given)


def test_variables_of_the_user_stay_unchanged():
    before = {"OMP_NUM_THREADS": "5", "LD_PRELOAD": "libmimalloc.so", "THP_MEM_ALLOC_ENABLE": "0"}
    given, rows = environment.variables(2, before, find=found("jemalloc"))
    assert not set(given) & set(before)
    names = (*before, "allocator")
    assert [row.why.endswith(", unchanged") for row in rows if row.name in names] == [True] * 3
    given, _ = environment.variables(2, {"LD_PRELOAD": "libother.so"}, find=found("jemalloc"))
    assert given["LD_PRELOAD"] == "libjemalloc.so.1:libother.so"


def test_missing_allocators_are_rejected_with_the_remedy():
    with pytest.raises(ValueError, match="apt-get install libjemalloc2"):
        environment.variables(1, {}, "jemalloc", find=found())
    result = CliRunner().invoke(app, ["launch", "--allocator", "best", "script.py"])
    assert result.exit_code == 2
    assert "allocator='best'" in result.output


def test_a_dry_run_only_prints(tmp_path):
    result = CliRunner().invoke(app, ["launch", "--dry-run", "--instances", "3", str(tmp_path / "none.py")])
    assert result.exit_code == 0
    assert "instance 2" in result.output
