"""Checks of ops in the emulator: `python -m tests.arm.checks TIER CHECK...`.

One after another in one process, since torch takes half a minute to import. One that fails does not keep the others from running.
"""

from __future__ import annotations

import importlib
import sys
import time
import traceback
from collections.abc import Iterator, Sequence

import torch

from hf_cpu_accel import extension
from hf_cpu_accel.runtime import hardware
from tests.ops.test_tiers import CHECKS

SEED = 1


def main(tier: str, *checks: str) -> int:
    failed, start = 0, time.monotonic()
    for name, said in results(tier, checks):
        print(f"{tier} {name} {said} {time.monotonic() - start:.0f} s", flush=True)
        failed, start = failed + (said != "passed"), time.monotonic()
    return failed


def results(tier: str, checks: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The name of each check after it has run on this tier, and "passed" or "FAILED"."""
    torch.set_num_threads(1)
    assert extension.status().tier == hardware.detect().tier == tier, (extension.status(), hardware.detect())
    for module, name in CHECKS.items():
        if name in checks:
            try:
                getattr(importlib.import_module(module), name)(seed=SEED)
                said = "passed"
            except Exception:
                traceback.print_exc()
                said = "FAILED"
            yield name, said


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
