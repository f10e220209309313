"""Compare text generation of PyTorch (eager) and accelerated models in one process; each system has a copy of the model."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import psutil
import torch
from torch import nn

from hf_cpu_accel import extension
from hf_cpu_accel.api import accelerate_for_cpu, explain
from hf_cpu_accel.cli.bench.generation_workload import Workload
from hf_cpu_accel.config import DTYPES
from hf_cpu_accel.measure import Estimate, PeakMemory, Timing, speedup
from hf_cpu_accel.measure.generation import Generated, generate
from hf_cpu_accel.measure.generation_cost import Cost, bytes_per_weight, cost, left_dtype, peak_of
from hf_cpu_accel.runtime import hardware
from hf_cpu_accel.runtime.hardware import Peaks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EAGER = ("float32", "bfloat16")
# The dtypes that read fewer bytes per token than float32, which makes generation fast.
DEFAULT_DTYPES = tuple(dtype for dtype in DTYPES if dtype not in ("auto", "float32"))


@dataclass(frozen=True)
class Result:
    """The results of one system.

    Attributes:
        system: name of the system.
        eager: True for PyTorch (eager).
        prefill: tokens/s of the prompts until the first new token, for the whole batch; median over the rounds.
        decode: tokens/s after the first new token, for the whole batch; median over the rounds.
        first: seconds to the first token.
        step: seconds per token of a row after the first token; mean of a call.
        first_speedup: speedup of `first` over the faster eager system, paired within each round.
        step_speedup: speedup of `step` over the faster eager system, paired within each round.
        step_bytes: bytes of weights that a token reads.
        flops_share: FLOP/s of the linear layers in prefill, as a share of the measured peak of this dtype; None without the native
            kernels, which measure the peak.
        read_share: bytes of weights per second in decode, as a share of the measured read bandwidth; None without these kernels.
        peak_bytes: maximum rise of resident memory from before the copy of the model to the end of its first call; None if
            unknown.
        ready_seconds: seconds from the call of `accelerate_for_cpu` to the end of the first call.
        runs: the measured calls.
    """

    system: str
    eager: bool
    prefill: float
    decode: float
    first: Estimate
    step: Estimate
    first_speedup: Estimate
    step_speedup: Estimate
    step_bytes: int
    flops_share: float | None
    read_share: float | None
    peak_bytes: int | None
    ready_seconds: float
    runs: tuple[Generated, ...]

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON values."""
        return asdict(self)


@dataclass
class _System:
    name: str
    model: PreTrainedModel
    dtype: str
    eager: bool
    step_bytes: int
    peak_bytes: int | None
    ready_seconds: float
    runs: list[Generated]

    def timing(self, part: str) -> Timing:
        return Timing(tuple((getattr(run, part),) for run in self.runs))


def measure(
    workload: Workload,
    dtypes: Sequence[str],
    eager: Sequence[str],
    *,
    repeats: int,
    threads: int | None = None,
    on_stage: Callable[[str], None] = lambda stage: None,
    on_burst: Callable[[str], None] = lambda system: None,
) -> list[Result]:
    """Measure eager and accelerated copies of one model, interleaved.

    Args:
        workload: the model, and the number of tokens.
        dtypes: dtypes for `accelerate_for_cpu`.
        eager: eager dtypes, at least one of `EAGER`.
        repeats: number of rounds. Each system generates once per round, after a call of two tokens that is not counted.
        threads: as in `CPUAccelConfig`. The caller applies it before, so that eager runs on as many threads.
        on_stage: called with a description of each stage.
        on_burst: called with the name of a system after each of its calls.

    Returns:
        One result per system, eager systems first.

    Raises:
        ValueError: the copies do not fit in memory together.
    """
    on_stage(f"loading {workload.title}")
    original = workload.build()
    inputs = workload.inputs(original)
    _check_memory(original, dtypes, eager)
    on_stage("counting bytes and operations")
    needs = cost(original, inputs)
    systems: list[_System] = []
    for dtype, is_eager in [*((dtype, True) for dtype in eager), *((dtype, False) for dtype in dtypes)]:
        name = f"eager {dtype}" if is_eager else dtype
        on_stage(f"preparing {name}")
        with PeakMemory() as memory:
            model = copy.deepcopy(original) if is_eager else workload.to_accelerate(original)
            if dtype == "float32":
                nn.Module.float(model)  # float() of transformers rejects models from GGUF files
            start = time.perf_counter()
            if not is_eager:
                # The copy is never restored, so its original weights are dropped.
                accelerate_for_cpu(model, dtype=dtype, threads=threads, originals="drop")
            generate(model, inputs, workload.new)
            ready = time.perf_counter() - start
        plan = explain(model)
        step_bytes = needs.step_bytes(left_dtype(model), plan.packed_dtypes)
        resolved = dtype if is_eager else plan.dtype  # the dtype that "auto" stands for
        systems.append(_System(name, model, resolved, is_eager, step_bytes, memory.peak_bytes, ready, []))
    del original, model
    on_stage("measuring")
    before = _peaks(threads)
    order = list(systems)
    for _ in range(repeats):
        for system in order:
            generate(system.model, inputs, 2)
            system.runs.append(generate(system.model, inputs, workload.new))
            on_burst(system.name)
        order.reverse()
    return _results(systems, workload, needs, [peaks for peaks in (before, _peaks(threads)) if peaks])


def _results(
    systems: Sequence[_System], workload: Workload, needs: Cost, probes: Sequence[Peaks]
) -> list[Result]:
    eager = [system for system in systems if system.eager]
    first_base, step_base = (
        min((system.timing(part) for system in eager), key=lambda timing: timing.seconds.value)
        for part in ("first", "step")
    )
    results = []
    for system in systems:
        first, step = system.timing("first"), system.timing("step")
        flops_share = read_share = None
        if probes:  # the limits of the machine are those of the better probe
            peak = max(peak_of(peaks, system.dtype) for peaks in probes)
            bandwidth = max(peaks.read_bandwidth for peaks in probes)
            flops_share = needs.first_flops / first.seconds.value / (peak * 1e9)
            read_share = system.step_bytes / step.seconds.value / (bandwidth * 1e9)
        results.append(
            Result(
                system=system.name,
                eager=system.eager,
                prefill=workload.batch * workload.prompt / first.seconds.value,
                decode=workload.batch / step.seconds.value,
                first=first.seconds,
                step=step.seconds,
                first_speedup=speedup(first_base, first),
                step_speedup=speedup(step_base, step),
                step_bytes=system.step_bytes,
                flops_share=flops_share,
                read_share=read_share,
                peak_bytes=system.peak_bytes,
                ready_seconds=system.ready_seconds,
                runs=tuple(system.runs),
            )
        )
    return results


def _check_memory(model: PreTrainedModel, dtypes: Sequence[str], eager: Sequence[str]) -> None:
    parameters = sum(parameter.numel() for parameter in model.parameters())
    # Embedding tables are not packed.
    table = max(parameter.nbytes for parameter in model.parameters())
    needed = sum(parameters * torch.empty(0, dtype=getattr(torch, dtype)).element_size() for dtype in eager)
    for dtype in dtypes:
        at_most = "float32" if dtype == "auto" else dtype
        needed += round(parameters * bytes_per_weight(at_most)) + table
    available = psutil.virtual_memory().available
    if needed > available:
        raise ValueError(
            f"the copies for {len(dtypes)} dtypes and {len(eager)} eager systems need about {needed / 1e9:.1f} GB, but "
            f"{available / 1e9:.1f} GB are available; pass fewer --dtypes, or --eager bfloat16"
        )


def _peaks(threads: int | None) -> Peaks | None:
    return hardware.measure_peaks(threads) if extension.status().loaded else None
