"""One system in a process of its own: prepares, then serves bursts on request.

Protocol: one JSON object per line. The worker says {"ready": {...}} or {"error": "..."} once. Then it
answers {"do": "burst", "calls": n, "seconds": s} by {"times": [...]}, {"do": "output", "path": p} by
{"saved": p} once the float outputs lie there (torch.save), and {"do": "quit"} ends it.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from typing import IO

import torch
from torch import Tensor

from benchmarks import systems, workloads
from hf_cpu_accel.measure import PeakMemory, burst
from hf_cpu_accel.runtime.threads import apply_threads


def main(workload_name: str, system: str, threads: str) -> None:
    """Run until told to quit; `threads` is a number, or empty for the machine's own choice."""
    answers = _private_stdout()
    try:
        workload = workloads.parse(workload_name)
        choice = apply_threads(int(threads) if threads else None)
        model = workload.build()
        inputs = workload.inputs(model)
        with PeakMemory() as memory:
            start = time.perf_counter()
            prepared = systems.SYSTEMS[system](model)
            output = workload.forward(prepared, inputs)
            first_result = time.perf_counter() - start
    except Exception as error:
        traceback.print_exc()
        _say(answers, {"error": f"{type(error).__name__}: {error}"})
        return
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    ready = {
        "threads": choice.count,
        "first_result_seconds": first_result,
        "added_peak_bytes": memory.peak_bytes,
        "model_bytes": weights,
    }
    _say(answers, {"ready": ready})
    _serve(answers, lambda: workload.forward(prepared, inputs), output)


def _serve(answers: IO[str], call: object, output: list[Tensor]) -> None:
    assert callable(call)
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "quit":
            return
        if request["do"] == "output":
            torch.save([tensor.float() for tensor in output], request["path"])
            _say(answers, {"saved": request["path"]})
        else:
            _say(answers, {"times": burst(call, calls=request["calls"], seconds=request["seconds"])})


def _private_stdout() -> IO[str]:
    """The pipe to the driver, taken away from print(): libraries that print must not break the protocol."""
    pipe = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return pipe


def _say(answers: IO[str], message: dict[str, object]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
