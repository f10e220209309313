"""The child that compiles gives way to the model that serves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from hf_cpu_accel.compiler.background.jobs import _yield_to_us  # before the fixture `children` replaces it


def test_the_child_has_the_lowest_priority_in_and_between_sessions() -> None:
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as child:
        _yield_to_us(child.pid)
        assert os.getpriority(os.PRIO_PROCESS, child.pid) == 19
        group = Path(f"/proc/{child.pid}/autogroup")
        if group.exists():  # Linux with CONFIG_SCHED_AUTOGROUP
            assert group.read_text().split()[-1] == "19"
        child.communicate(b"\n")
    _yield_to_us(child.pid)  # it is gone: nothing happens
