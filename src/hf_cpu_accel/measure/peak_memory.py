"""The peak of resident memory inside a `with` block, from the kernel's own high-water mark."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from types import TracebackType

from hf_cpu_accel.runtime.memory import trim_heap

_PROC = Path("/proc/self")


class PeakMemory:
    """Measures the peak growth of resident memory, in bytes.

        with PeakMemory() as memory:
            model = accelerate_for_cpu(model)
        memory.peak_bytes

    `peak_bytes` is None if the high-water mark cannot be reset (not Linux, or /proc is read-only). The mark is of the process, so
    it includes allocations of other threads.
    """

    peak_bytes: int | None = None

    def __enter__(self) -> PeakMemory:
        gc.collect()
        trim_heap()  # the measurement would not see the reuse of memory that the allocator keeps
        self._before: int | None = None
        if _reset_high_water_mark():
            self._before = _status_bytes("VmRSS")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._before is not None:
            self.peak_bytes = max(0, _status_bytes("VmHWM") - self._before)


def _reset_high_water_mark() -> bool:
    try:
        (_PROC / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _status_bytes(field: str) -> int:
    status = (_PROC / "status").read_text()
    found = re.search(rf"^{field}:\s+(\d+) kB", status, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"/proc/self/status has no field {field}; this kernel does not report peak memory")
    return int(found.group(1)) * 1024
