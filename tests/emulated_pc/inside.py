"""The first process of the emulated PC: runs checks of ops and switches the PC off.

python -m tests.emulated_pc.inside TIER CHECK...
"""

from __future__ import annotations

import ctypes
import faulthandler
import sys
import termios
import traceback

POWER_OFF = 0x4321FEDC
FILE_SYSTEMS = {"/proc": "proc", "/sys": "sysfs", "/dev": "devtmpfs", "/tmp": "tmpfs"}


def main(tier: str, checks: list[str]) -> None:
    """Prints a line when the checks begin, and one for each: the clock of this PC says nothing."""
    from tests.arm.checks import results  # imports torch, which reads /proc

    take_roots_without_the_emulator()
    print("BEGUN", flush=True)
    for name, said in results(tier, checks):
        print("CHECK", name, said, flush=True)


def take_roots_without_the_emulator() -> None:
    """Have torch, whose results ours are compared with, take right roots: the emulator's of vectors are wrong, 0.25 of 0.125."""
    import torch

    def sqrt(x: torch.Tensor) -> torch.Tensor:
        return (x.double().log() / 2).exp().to(x.dtype)

    torch.Tensor.sqrt = sqrt  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    faulthandler.enable()
    libc = ctypes.CDLL(None, use_errno=True)
    for folder, kind in FILE_SYSTEMS.items():
        if libc.mount(kind.encode(), folder.encode(), kind.encode(), 0, None):
            raise OSError(ctypes.get_errno(), f"cannot mount {folder}")
    try:
        main(sys.argv[1], sys.argv[2:])
    except BaseException:
        traceback.print_exc()
    finally:
        print("OVER", flush=True)
        termios.tcdrain(sys.stdout.fileno())
        libc.reboot(POWER_OFF)
