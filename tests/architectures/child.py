"""Checks the types that it is given, one after another, and writes a JSON line for each:
`python -m tests.architectures.child FILE DTYPE,... TYPE...`.

A line {"started": type} comes before, so that who started this knows by which type the process ended.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from typing import Any

SECONDS = 100  # of CPU time for one type
_MEMORY = 8 << 30


def main(file: str, dtypes: tuple[str, ...], types: list[str]) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    import torch
    from transformers.utils import logging

    from tests.architectures.check import check

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    signal.signal(signal.SIGPROF, _too_long)
    with open(file, "a") as lines:
        for model_type in types:
            _write(lines, {"started": model_type})
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            try:
                result = check(model_type, dtypes)
            except Exception as error:
                result = {
                    "type": model_type,
                    "status": "wrong",
                    "problems": [f"{type(error).__name__}: {str(error)[:300]}"],
                }
            signal.setitimer(signal.ITIMER_PROF, 0)
            _write(lines, result)


def _too_long(*_: Any) -> None:
    raise TimeoutError(f"more than {SECONDS} seconds of CPU time")


def _write(lines: Any, value: dict[str, Any]) -> None:
    lines.write(json.dumps(value, default=str) + "\n")
    lines.flush()


if __name__ == "__main__":
    os.environ.setdefault("HF_CPU_ACCEL_PROVIDERS", "own")
    main(sys.argv[1], tuple(sys.argv[2].split(",")), sys.argv[3:])
