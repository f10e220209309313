"""The messages between a worker process and the driver; the worker's side, for every environment.

One JSON object per line. The worker sends {"ready": {...}} or {"error": "..."} once. Then it answers
{"do": "burst", "calls": n, "seconds": s} by {"times": [...]}, {"do": "output", "path": p} by {"saved": p}
once the float32 outputs lie there (numpy.savez), {"do": "generate"} by {"first": s, "steps": [...]}, and
{"do": "quit"} ends it.

Rivals are measured in environments without this package, so nothing here may need more than numpy.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# The package's own burst, so that all systems are timed by the same lines; its file needs the standard library only.
_TIMING = Path(__file__).resolve().parent.parent / "src" / "hf_cpu_accel" / "measure" / "timing.py"
burst: Callable[..., tuple[float, ...]] = runpy.run_path(str(_TIMING))["burst"]


@dataclass(frozen=True)
class Prepared:
    """A system after its first call.

    call: one forward pass. outputs: those of the first call, float32. facts: the worker's "ready" message.
    """

    call: Callable[[], object]
    outputs: Sequence[np.ndarray]
    facts: dict[str, Any]


@dataclass(frozen=True)
class Writer:
    """A system that generates text, after its first text.

    generate: one text, as seconds to the first token and of each token after it. facts: as in Prepared.
    """

    generate: Callable[[], tuple[float, Sequence[float]]]
    facts: dict[str, Any]


def serve(prepare: Callable[[], Prepared | Writer]) -> None:
    """Prepare, report the result, and respond to requests from standard input until a request to quit."""
    # The pipe to the driver is taken away from print(): libraries that print must not break the protocol.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(message: dict[str, object]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    try:
        prepared = prepare()
    except Exception as error:
        traceback.print_exc()
        say({"error": f"{type(error).__name__}: {error}"})
        return
    say({"ready": prepared.facts})
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "quit":
            return
        say(_answer(prepared, request))


def _answer(prepared: Prepared | Writer, request: dict[str, Any]) -> dict[str, object]:
    if isinstance(prepared, Writer):
        first, steps = prepared.generate()
        return {"first": first, "steps": list(steps)}
    if request["do"] == "output":
        np.savez(request["path"], *prepared.outputs)
        return {"saved": request["path"]}
    return {"times": burst(prepared.call, calls=request["calls"], seconds=request["seconds"])}
