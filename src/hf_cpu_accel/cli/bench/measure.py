"""Compare PyTorch (eager) with accelerated models in one process; each system has a copy of the model."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from torch import Tensor

from hf_cpu_accel.api import accelerate_for_cpu
from hf_cpu_accel.cli.bench.workload import Workload
from hf_cpu_accel.measure import Agreement, Estimate, PeakMemory, Timing, compare, interleaved, speedup

EAGER = "eager float32"
# Long enough for several calls of all but the slowest models, whose median is then meaningful.
_BURST_SECONDS = 0.1


@dataclass(frozen=True)
class Result:
    """The results of one system.

    Attributes:
        system: `EAGER` or a dtype.
        seconds: seconds per forward call.
        speedup: speedup over eager float32, paired within each round.
        agreement: difference of the outputs from those of eager float32.
        peak_bytes: maximum rise of resident memory from before the copy of the model to its first result; None if unknown.
        ready_seconds: seconds from the call of `accelerate_for_cpu` to the first result.
        timing: the measured times.
    """

    system: str
    seconds: Estimate
    speedup: Estimate
    agreement: Agreement
    peak_bytes: int | None
    ready_seconds: float
    timing: Timing

    @property
    def slower(self) -> bool:
        return self.speedup.value < 1

    def to_dict(self) -> dict[str, object]:
        return {"slower_than_eager": self.slower, **asdict(self)}


def measure(
    workload: Workload,
    dtypes: Sequence[str],
    *,
    repeats: int,
    threads: int | None = None,
    on_stage: Callable[[str], None] = lambda stage: None,
    on_burst: Callable[[str], None] = lambda system: None,
) -> list[Result]:
    """Measure eager float32 and each accelerated dtype, interleaved.

    Args:
        workload: the model and its inputs.
        dtypes: dtypes for `accelerate_for_cpu`.
        repeats: number of rounds; each system runs one burst of calls per round.
        threads: as in `CPUAccelConfig`. The caller applies it before, so that eager runs on as many threads.
        on_stage: called with a description of each stage.
        on_burst: called with the name of a system after each of its bursts.

    Returns:
        One result per system, eager first.
    """
    on_stage(f"loading {workload.title}")
    original = workload.build()
    inputs = workload.inputs(original)
    calls: dict[str, Callable[[], list[Tensor]]] = {}
    outputs: dict[str, list[Tensor]] = {}
    peaks: dict[str, int | None] = {}
    ready: dict[str, float] = {}
    for system, dtype in [(EAGER, None), *((dtype, dtype) for dtype in dtypes)]:
        on_stage(f"preparing {system}")
        with PeakMemory() as memory:
            model = copy.deepcopy(original) if dtype is None else workload.to_accelerate(original)
            start = time.perf_counter()
            if dtype is not None:
                accelerate_for_cpu(model, dtype=dtype, threads=threads)
            outputs[system] = workload.forward(model, inputs)
            ready[system] = time.perf_counter() - start
        peaks[system] = memory.peak_bytes
        calls[system] = lambda model=model: workload.forward(model, inputs)  # type: ignore[misc]
    del original, model
    on_stage("measuring")
    timings = interleaved(calls, rounds=repeats, seconds=_BURST_SECONDS, on_burst=on_burst)
    return [
        Result(
            system=system,
            seconds=timing.seconds,
            speedup=speedup(timings[EAGER], timing),
            agreement=compare(outputs[system], outputs[EAGER]),
            peak_bytes=peaks[system],
            ready_seconds=ready[system],
            timing=timing,
        )
        for system, timing in timings.items()
    ]
