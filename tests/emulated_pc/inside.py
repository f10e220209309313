"""The first process of the emulated PC: runs checks of ops and switches the PC off.

python -m tests.emulated_pc.inside TIER SEED CHECK...
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import sys
import termios
import traceback

POWER_OFF = 0x4321FEDC
FILE_SYSTEMS = {"/proc": "proc", "/sys": "sysfs", "/dev": "devtmpfs", "/tmp": "tmpfs"}


def main(tier: str, seed: int, checks: list[str]) -> None:
    import torch

    from hf_cpu_accel import extension
    from hf_cpu_accel.runtime import hardware
    from tests.ops.test_tiers import CHECKS

    torch.set_num_threads(1)
    found = extension.status()
    print(f"READY {found.tier} {hardware.detect().model_name}", flush=True)
    assert found.tier == hardware.detect().tier == tier, (found, hardware.detect())
    for module, name in CHECKS.items():
        if name in checks:
            try:
                getattr(importlib.import_module(module), name)(seed=seed)
                said = "passed"
            except Exception:
                traceback.print_exc()
                said = "FAILED"
            print(f"CHECK {name} {said}", flush=True)


if __name__ == "__main__":
    faulthandler.enable()
    libc = ctypes.CDLL(None, use_errno=True)
    for folder, kind in FILE_SYSTEMS.items():
        if libc.mount(kind.encode(), folder.encode(), kind.encode(), 0, None):
            raise OSError(ctypes.get_errno(), f"cannot mount {folder}")
    try:
        main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
    except BaseException:
        traceback.print_exc()
    finally:
        print("OVER", flush=True)
        termios.tcdrain(sys.stdout.fileno())
        libc.reboot(POWER_OFF)
