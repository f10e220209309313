"""One model of a suite in a process of its own: `python -m benchmarks.suites.worker CASE SYSTEMS ROUNDS SECONDS THREADS`.

All systems are in it, each with a copy of the model, and take turns. The last line of its output is JSON: for each
system the seconds of its bursts and the agreement of its output with eager's, or its error.
"""

from __future__ import annotations

import copy
import gc
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from benchmarks import systems
from benchmarks.suites.cases import Case, case
from hf_cpu_accel.measure import compare, interleaved
from hf_cpu_accel.runtime.threads import apply_threads

_CALLS = 3  # before it is timed: the first learn, record and compare


def main(name: str, chosen: str, rounds: str, seconds: str, threads: str) -> None:
    apply_threads(int(threads) if threads else None)
    found = case(name)
    assert found is not None, name
    calls, answers, failed = _prepared(found, chosen.split(","))
    timings = interleaved(calls, rounds=int(rounds), calls=2, seconds=float(seconds))
    results: dict[str, Any] = {system: {"error": error} for system, error in failed.items()}
    for system, timing in timings.items():
        agreement = compare(answers[system], answers[systems.BASE])
        results[system] = {"rounds": timing.rounds, "cosine": agreement.worst_cosine}
    print(json.dumps(results))


def _prepared(
    found: Case, chosen: list[str]
) -> tuple[dict[str, Callable[[], Any]], dict[str, list[Tensor]], dict[str, str]]:
    """Return the call of each system, its output, and the errors of the systems without one."""
    model = found.build()
    calls: dict[str, Callable[[], Any]] = {}
    answers: dict[str, list[Tensor]] = {}
    failed: dict[str, str] = {}
    for system in chosen:
        try:
            calls[system], answers[system] = _ready(found, model, system)
        except Exception as error:
            if system == systems.BASE:
                raise
            failed[system] = f"{type(error).__name__}: {error}"
        gc.collect()
    return calls, answers, failed


def _ready(found: Case, model: nn.Module, system: str) -> tuple[Callable[[], Any], list[Tensor]]:
    made = systems.SYSTEMS[system]
    own = model if system == systems.BASE else copy.deepcopy(model)
    inputs = {
        name: value.to(made.dtype) if value.is_floating_point() else value
        for name, value in found.inputs(model).items()
    }
    prepared = made.prepare(own.to(made.dtype))
    call = partial(found.forward, prepared, inputs)
    for _ in range(_CALLS):
        outputs = call()
    return call, [output.float() for output in found.real_tokens(outputs)]


if __name__ == "__main__":
    main(*sys.argv[1:])
