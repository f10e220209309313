"""One of the project's own systems in a separate process: prepares, then runs bursts; see protocol.py."""

from __future__ import annotations

import sys
import time

from benchmarks import protocol, systems, workloads
from hf_cpu_accel.measure import PeakMemory
from hf_cpu_accel.runtime.threads import apply_threads


def prepare(workload_name: str, system: str, threads: str) -> protocol.Prepared:
    """Build the model and run it once; `threads` is a number, or empty for the default."""
    workload = workloads.parse(workload_name)
    choice = apply_threads(int(threads) if threads else None)
    chosen = systems.SYSTEMS[system]
    model = workload.build()
    inputs = {
        name: tensor.to(chosen.dtype) if tensor.is_floating_point() else tensor
        for name, tensor in workload.inputs(model).items()
    }
    with PeakMemory() as memory:
        options = {"calibration": workloads.examples(workload, model)} if chosen.calibrates else {}
        start = time.perf_counter()
        prepared = chosen.prepare(model.to(chosen.dtype), **options)
        outputs = workload.forward(prepared, inputs)
        first_result = time.perf_counter() - start
    facts = {
        "threads": choice.count,
        "first_result_seconds": first_result,
        "added_peak_bytes": memory.peak_bytes,
        "model_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
    }
    return protocol.Prepared(
        lambda: workload.forward(prepared, inputs), [output.float().numpy() for output in outputs], facts
    )


if __name__ == "__main__":
    protocol.serve(lambda: prepare(*sys.argv[1:]))
