"""Text generation by one of the project's own systems, in a separate process; see protocol.py."""

from __future__ import annotations

import sys
import time

from benchmarks import protocol
from benchmarks.generation.systems import SYSTEMS
from hf_cpu_accel import explain
from hf_cpu_accel.cli.bench.generation_workload import workload as make_workload
from hf_cpu_accel.measure.generation import generate
from hf_cpu_accel.measure.generation_cost import cost, left_dtype
from hf_cpu_accel.runtime.threads import apply_threads


def prepare(system: str, case: str, prompt: str, new: str, threads: str) -> protocol.Writer:
    """Load the checkpoint of `case` and generate once; `threads` is a number, or empty for the default."""
    dtype, make = SYSTEMS[system]
    choice = apply_threads(int(threads) if threads else None)
    workload = make_workload(f"{case}/model", None, 1, int(prompt), int(new))
    model = workload.build()
    inputs = workload.inputs(model)
    needs = cost(model, inputs)
    start = time.perf_counter()
    model = make(model)
    generate(model, inputs, workload.new)
    facts = {
        "dtype": dtype,
        "threads": choice.count,
        "first_result_seconds": time.perf_counter() - start,
        "first_flops": needs.first_flops,
        "step_bytes": needs.step_bytes(left_dtype(model), explain(model).packed_dtypes),
    }

    def write() -> tuple[float, tuple[float, ...]]:
        written = generate(model, inputs, workload.new)
        return written.first, written.steps

    return protocol.Writer(write, facts)


if __name__ == "__main__":
    protocol.serve(lambda: prepare(*sys.argv[1:]))
